"""A prediction of the load that a real cluster runs, by a machine model fitted to a few requests on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from benchmarks.peers.peer import Settings
from benchmarks.peers.process import ROOT
from benchmarks.rendered_prompts import rendered_prompts
from benchmarks.simulator.real import Measured, Plan, measure
from benchmarks.slo.systems import FIFO, TREESERVE, make_systems
from benchmarks.slo.targets import Target
from benchmarks.slo.trace import CLASSES
from treeserve_core.qos import DEFAULT_POLICIES
from treeserve_core.sampling import ServiceClass
from treeserve_simulator.calibration import calibrate
from treeserve_simulator.comparison import predict
from treeserve_simulator.costs import MachineModel
from treeserve_simulator.fitting import fit_costs, fit_kinds
from treeserve_simulator.systems import SYSTEMS, Cluster
from treeserve_text.tokenizer import Tokenizer
from treeserve_verifier.config import default_threads

MOST_ERROR = 0.2
_TURN_MS = 1.0  # what the event loop takes to plan a step and to settle it, beside the engine on two cores; a guess
_NO_TARGET_MS = 1e9  # for a class without one: requests that say nothing would be given their class's


def check(settings: Settings, plan: Plan, say: Callable[[str], None]) -> tuple[MachineModel, dict[str, Any]]:
    """Measure, fit and predict, for the plain system and for treeserve.

    Returns the fitted model, and for each system measured and predicted latencies.

    Raises:
        PeerError: if a cluster does not start or a request fails.
    """
    model = calibrate(ROOT / settings.folder, ROOT / settings.cache)
    model = replace(model, overheads=replace(model.overheads, turn_ms=_TURN_MS))
    say(f"{model.origin}: a pass of one row takes {model.costs.logits_pass_ms(1):.2f} ms")
    systems = make_systems()
    prompts = rendered_prompts(Tokenizer.from_folder(ROOT / settings.folder))
    policies = {name: DEFAULT_POLICIES[ServiceClass[name.upper()]] for name in CLASSES}
    targets = {
        name: Target(policy.ttft_ms or _NO_TARGET_MS, policy.tpot_ms or _NO_TARGET_MS)
        for name, policy in policies.items()
    }
    options = ("dtype=int8", f"threads={default_threads()}")
    compared = {name: systems[name] for name in (FIFO, TREESERVE)}
    measured = measure(settings, options, compared, prompts, targets, plan)
    plain = measured[FIFO]
    cluster = Cluster(model, verifier={"kv_tokens": str(settings.kv_tokens)})
    cluster = replace(cluster, machine=fit_costs(cluster, SYSTEMS[FIFO], plain.alone, plain.together))
    cluster = replace(cluster, machine=fit_kinds(cluster, SYSTEMS[TREESERVE], measured[TREESERVE].alone))
    return cluster.machine, {
        "plan": asdict(plan),
        "costs": asdict(cluster.machine.costs),
        "overheads": asdict(cluster.machine.overheads),
        "kinds": {name: asdict(kind) for name, kind in cluster.machine.kinds.items()},
        "systems": {name: _compared(name, measured[name], cluster, say) for name in measured},
    }


def _compared(name: str, measured: Measured, cluster: Cluster, say: Callable[[str], None]) -> dict[str, Any]:
    comparisons = predict(measured.loaded, cluster, SYSTEMS[name])
    for each in comparisons:
        say(f"{name} {each.quantity}: measured {each.measured:.1f}, predicted {each.predicted:.1f}: {each.error:+.1%}")
    return {
        "requests": len(measured.loaded),
        "figures": {
            each.quantity: {"measured": each.measured, "predicted": each.predicted, "error": each.error}
            for each in comparisons
        },
        "within": all(abs(each.error) <= MOST_ERROR for each in comparisons),
    }
