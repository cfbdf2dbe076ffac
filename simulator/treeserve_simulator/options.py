"""Text options of the command line: targets of classes, and settings of the simulated services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.arrivals import CONVERSATIONS, MIXED, Traffic

MIXES: Mapping[str, tuple[Traffic, ...]] = {"mixed": MIXED, "conversations": CONVERSATIONS}


def parse_targets(texts: Iterable[str]) -> dict[ServiceClass, QosPolicy]:
    """The default policies with other targets.

    Args:
        texts: such as ``realtime=500:30``, TTFT and TPOT in milliseconds; an empty number is no target.

    Raises:
        InvalidArgumentError: for anything else.
    """
    policies = dict(DEFAULT_POLICIES)
    for text in texts:
        name, _, values = text.partition("=")
        ttft, _, tpot = values.partition(":")
        try:
            service_class = ServiceClass[name.upper()]
            ttft_ms, tpot_ms = (float(value) if value else None for value in (ttft, tpot))
        except (KeyError, ValueError):
            raise InvalidArgumentError("targets", f"{text!r} is not CLASS=TTFT_MS:TPOT_MS") from None
        policies[service_class] = replace(policies[service_class], ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    return policies


def parse_settings(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Fields of the services' configurations by role, from texts such as ``verifier.max_sequences=16``.

    Raises:
        InvalidArgumentError: for anything else.
    """
    settings: dict[str, dict[str, str]] = {"router": {}, "verifier": {}}
    for text in texts:
        role, dot, assignment = text.partition(".")
        name, equals, value = assignment.partition("=")
        if role not in settings or not dot or not equals or not name:
            raise InvalidArgumentError("settings", f"{text!r} is not router.FIELD=VALUE or verifier.FIELD=VALUE")
        settings[role][name] = value
    return settings
