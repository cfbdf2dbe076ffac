"""What requests are promised: the policies of the service classes, and who may ask for more than his due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeserve_core.errors import InvalidArgumentError, PermissionDeniedError
from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_wire.config import merged

Policies = Mapping[ServiceClass, QosPolicy]


@dataclass(frozen=True)
class ServiceLevels:
    """Resolves what a request asks for against what it is due.

    Attributes:
        policies: one for each class.
        default_class: what a request is due if nobody says.
        class_header: lower-case name of the header or metadata in which a gateway says what class a request is due;
            empty for none.
        trust_clients: clients may ask for more than they are due.
    """

    policies: Policies = field(default_factory=lambda: DEFAULT_POLICIES)
    default_class: ServiceClass = ServiceClass.STANDARD
    class_header: str = ""
    trust_clients: bool = True

    def resolve(
        self, asked: SequenceLimits, *, class_given: bool, values: Callable[[str], Sequence[str]]
    ) -> SequenceLimits:
        """The limits in force: what is asked for, and of the class's policy what is not.

        Anybody may ask for less than he is due: a less urgent class, looser targets, fewer nodes.

        Args:
            class_given: the client chose asked.service_class.
            values: the request's values of a header. Two of them are one too many to be the gateway's.

        Raises:
            PermissionDeniedError: if a client that is not trusted asks for more.
            InvalidArgumentError: if the gateway names an unknown class.
        """
        due = self._due(values)
        service_class = asked.service_class if class_given else due
        if service_class < due and not self.trust_clients:
            raise PermissionDeniedError(
                f"service_level.service_class: {_name(service_class)} is more urgent than {_name(due)}, what is due"
            )
        policy = self.policies[service_class]
        return replace(
            asked,
            service_class=service_class,
            ttft_ms=self._target("ttft_ms", asked.ttft_ms, policy.ttft_ms, service_class),
            tpot_ms=self._target("tpot_ms", asked.tpot_ms, policy.tpot_ms, service_class),
            max_nodes=min((n for n in (asked.max_nodes, policy.max_nodes) if n is not None), default=None),
            preemptible=policy.preemptible,
        )

    def _due(self, values: Callable[[str], Sequence[str]]) -> ServiceClass:
        given = values(self.class_header) if self.class_header else ()
        return class_named(given[0], self.class_header) if len(given) == 1 else self.default_class

    def _target(
        self, name: str, asked: float | None, promised: float | None, service_class: ServiceClass
    ) -> float | None:
        if asked is None:
            return promised
        if (promised is None or asked < promised) and not self.trust_clients:
            than = "no target" if promised is None else f"{promised:g} ms"
            raise PermissionDeniedError(
                f"service_level.{name}: {asked:g} ms is tighter than what class {_name(service_class)} has: {than}"
            )
        return asked


def class_named(name: str, field: str) -> ServiceClass:
    """The class of a lower-case name. Raises InvalidArgumentError, naming the field, for another."""
    try:
        return {_name(c): c for c in ServiceClass}[name]
    except KeyError:
        raise InvalidArgumentError(field, f"{name[:40]!r} is none of {', '.join(map(_name, ServiceClass))}") from None


def policies_from(value: Mapping[str, Any]) -> Policies:
    """Policies from configuration: by class name, the fields of `QosPolicy` that are to differ from the defaults.

    Raises:
        InvalidArgumentError: for an unknown class or field, or a value that cannot work.
    """
    policies = dict(DEFAULT_POLICIES)
    for name, change in value.items():
        service_class = class_named(name, "qos")
        policies[service_class] = merged(policies[service_class], change, f"qos.{name}")
    return policies


def _name(service_class: ServiceClass) -> str:
    return service_class.name.lower()
