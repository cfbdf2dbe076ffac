"""Keeps out of the way what services log whenever something connects: in a simulation all of that is expected."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog


@contextmanager
def warnings_only() -> Iterator[None]:
    """Log nothing below a warning; afterwards logging is as it was."""
    was_configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        if was_configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()
