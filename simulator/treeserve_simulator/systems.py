"""The systems that are compared: treeserve, and two ways of doing without what it knows of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TypeVar

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.config import RouterConfig
from treeserve_simulator.costs import MachineModel
from treeserve_simulator.text import IDENTITY
from treeserve_verifier.config import VerifierConfig
from treeserve_wire.config import ConfigError, load_config

T = TypeVar("T", RouterConfig, VerifierConfig)


@dataclass(frozen=True)
class System:
    """A configuration of routers and verifiers.

    Attributes:
        queue_policy: the router's.
        speculates: whether speculators are attached.
        keeps_promises: whether router and verifiers are told classes and targets; else all requests are alike to them.
        verifier: fields of the verifiers' configuration.
    """

    name: str
    queue_policy: str
    speculates: bool
    keeps_promises: bool
    verifier: Mapping[str, str] = field(default_factory=dict)


_NO_PROMISES = dict.fromkeys(ServiceClass, QosPolicy())

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "treeserve": System("treeserve", "qos", speculates=True, keeps_promises=True),
        "fifo": System("fifo", "fifo", speculates=False, keeps_promises=False),
        "fixed": System(
            "fixed", "fifo", speculates=True, keeps_promises=False, verifier={"draft_always": "true", "max_nodes": "4"}
        ),
    }
)


def find_system(name: str) -> System:
    """The one of that name. Raises InvalidArgumentError if there is none."""
    if name not in SYSTEMS:
        raise InvalidArgumentError("system", f"there is no {name!r}, only {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


@dataclass(frozen=True)
class Cluster:
    """What all systems of a comparison have in common.

    Attributes:
        policies: by class, the targets that are judged, and what `treeserve` is told.
        verifier: fields of every verifier's configuration, below a system's own.
        router: fields of the router's configuration.

    Raises:
        ConfigError: for fields that there are not, or that cannot work.
    """

    machine: MachineModel
    verifiers: int = 1
    policies: Mapping[ServiceClass, QosPolicy] = field(default_factory=lambda: DEFAULT_POLICIES)
    verifier: Mapping[str, str] = field(default_factory=dict)
    router: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _config(VerifierConfig, "verifier", self.verifier)
        _config(RouterConfig, "router", self.router)

    def verifier_config(self, system: System, index: int) -> VerifierConfig:
        """Of one verifier of a system."""
        config = _config(VerifierConfig, "verifier", {**self.verifier, **system.verifier})
        return replace(config, verifier_id=f"verifier-{index}")

    def router_config(self, system: System) -> RouterConfig:
        """Of the router of a system."""
        config = _config(RouterConfig, "router", {"queue_policy": system.queue_policy, **self.router})
        return replace(config, qos=self.policies if system.keeps_promises else _NO_PROMISES)


def _config(cls: type[T], role: str, values: Mapping[str, str]) -> T:
    """A service's configuration with these fields. It names a model, of which nothing is read."""
    known = {"config", *(each.name for each in fields(cls))}  # argparse would refuse others by ending the process
    unknown = [name for name in values if name.replace("-", "_") not in known]
    if unknown:
        raise ConfigError(f"{role}: unknown fields {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    named = {"model_folder": "simulated", "model_name": IDENTITY.name, **values}
    try:
        return load_config(cls, [f"--{name.replace('_', '-')}={value}" for name, value in named.items()], {})
    except ConfigError as error:
        raise ConfigError(f"{role}: {' '.join(str(error).split())}") from error  # YAML's errors have several lines
