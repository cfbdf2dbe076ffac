"""How the main of each service runs: configuration, logging, signals, and exits that say why."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import structlog
import uvloop

from treeserve_core.errors import TreeserveError
from treeserve_wire.config import load_config
from treeserve_wire.telemetry import setup_logging

_log = structlog.get_logger(__name__)


class ServiceConfig(Protocol):
    """What every service's configuration has."""

    @property
    def log_level(self) -> str:
        """Least severe level that is logged."""


_C = TypeVar("_C", bound=ServiceConfig)


def run_service(
    role: str,
    config_class: type[_C],
    run: Callable[[_C, asyncio.Event], Coroutine[Any, Any, None]],
    argv: Sequence[str] | None,
) -> None:
    """Run a service until SIGTERM or SIGINT: both set the event that `run` gets, and `run` drains and returns.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Raises:
        SystemExit: with a message, if the configuration or a file or address that it names cannot be used.
    """

    async def until_stopped(config: _C) -> None:
        stop = asyncio.Event()

        def drain() -> None:
            _log.info("draining")
            stop.set()

        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, drain)
        await run(config, stop)

    try:
        config = load_config(config_class, argv)
        setup_logging(role, config.log_level)
        uvloop.run(until_stopped(config))
    except (TreeserveError, OSError) as error:
        sys.exit(f"treeserve_{role}: {error}")


def settle_in() -> None:
    """Call once a service is ready: what exists by then lives as long as it does.

    The garbage collector is told so. Else each of its full collections goes through the objects of every module and
    tokenizer that was loaded, and holds up all streams meanwhile.
    """
    gc.collect()
    gc.freeze()
