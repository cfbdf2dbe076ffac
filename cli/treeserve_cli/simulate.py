"""`treeserve simulate`: latency and load of a cluster on a virtual clock; the simulator is loaded only then."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from treeserve_cli.layout import ClusterConfig
from treeserve_cli.messages import failed, tell
from treeserve_cli.output_file import check_writable
from treeserve_core.errors import TreeserveError

if TYPE_CHECKING:
    from treeserve_simulator.systems import Cluster
    from treeserve_simulator.trace import TraceRequest

T = TypeVar("T")
_BAD_INPUT = 2  # exit status where what was given cannot be used

app = typer.Typer(help="Study latency, load and policies on a virtual clock.", no_args_is_help=True)

Machine = Annotated[
    Path | None, typer.Option(help="Costs of the machine, from `calibrate`; without it the shipped ones.")
]
Verifiers = Annotated[int, typer.Option(min=1, help="Verifiers, each with a speculator.")]
Systems = Annotated[list[str] | None, typer.Option("--system", help="treeserve, fifo or fixed. May be repeated.")]
Targets = Annotated[
    list[str] | None, typer.Option(help="Targets of a class in milliseconds: realtime=TTFT:TPOT. May be repeated.")
]
Settings = Annotated[
    list[str] | None, typer.Option(help="A field of a service, such as verifier.max_sequences=16. May be repeated.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
Count = Annotated[int, typer.Option("--requests", min=1, help="Requests to draw.")]
Rate = Annotated[float, typer.Option(help="Conversations that begin per second, on average.")]
PatternName = Annotated[str, typer.Option("--pattern", help="Arrivals: poisson, bursts or diurnal.")]
MixName = Annotated[str, typer.Option("--mix", help="Requests: mixed or conversations.")]


@app.callback()
def _simulate() -> None:
    """Study latency, load and policies on a virtual clock."""


@app.command()
def trace(
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")],
    requests: Count = 1000,
    rate: Rate = 4.0,
    pattern: PatternName = "poisson",
    mix: MixName = "mixed",
    seed: Seed = 0,
) -> None:
    """Draw a trace."""
    from treeserve_simulator.trace import write_trace

    drawn = _guarded(lambda: _draw(requests, rate, pattern, mix, seed), _BAD_INPUT)
    _guarded(lambda: write_trace(out, drawn))
    print(f"{out}: {len(drawn)} requests in {drawn[-1].at_s:.0f} s")


@app.command()
def run(
    trace: Annotated[Path | None, typer.Option(help="A JSONL trace; without it one is drawn.")] = None,
    system: Systems = None,
    verifiers: Verifiers = 1,
    requests: Count = 1000,
    rate: Rate = 4.0,
    pattern: PatternName = "poisson",
    mix: MixName = "mixed",
    machine: Machine = None,
    targets: Targets = None,
    settings: Settings = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    records: Annotated[Path | None, typer.Option(help="Write what became of every request, as JSONL.")] = None,
) -> None:
    """Run a trace through each system and print what its requests got."""
    from treeserve_simulator.report import report, table
    from treeserve_simulator.simulation import simulate
    from treeserve_simulator.systems import SYSTEMS, find_system
    from treeserve_simulator.trace import read_trace

    systems = _guarded(lambda: [find_system(name) for name in system or SYSTEMS], _BAD_INPUT)
    cluster = _guarded(lambda: _cluster(machine, verifiers, targets, settings), _BAD_INPUT)
    asked = _guarded(
        lambda: read_trace(trace) if trace is not None else _draw(requests, rate, pattern, mix, seed), _BAD_INPUT
    )
    if records is not None:
        _guarded(lambda: check_writable(records))
    reports, lines = [], []
    for each in systems:
        outcome = _guarded(partial(simulate, asked, cluster, each, seed))
        tell(f"{each.name}: {outcome.simulated_s:.0f} s in {outcome.cpu_s:.1f} s")
        reports.append(report(outcome, cluster.policies))
        lines += [{"system": each.name, **record.to_json()} for record in outcome.records]
    if as_json:
        print(json.dumps({each["system"]: each for each in reports}, indent=1))
    else:
        print(table(reports))
    if records is not None:
        _guarded(lambda: records.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="The file to write, for --machine.")],
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder or .gguf file; without it the default model.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default half the cores, but two.")] = None,
) -> None:
    """Measure what forward passes cost on this machine, which should do nothing else meanwhile."""
    from treeserve_simulator.calibration import calibrate as measure

    config = ClusterConfig(model=model)
    _guarded(lambda: check_writable(out))
    measured = _guarded(lambda: measure(config.model_source, config.cache_dir, threads, tell))
    _guarded(lambda: measured.write(out))
    print(f"{out}: {measured.origin}")


@app.command()
def compare(
    recorded: Annotated[Path, typer.Argument(help="A trace whose lines have ttft_ms and tpot_ms, measured.")],
    machine: Machine = None,
    system: Annotated[str, typer.Option(help="The system that was measured.")] = "treeserve",
    verifiers: Verifiers = 1,
    targets: Targets = None,
    settings: Settings = None,
    most: Annotated[float, typer.Option(help="Largest relative error; beyond it the exit status is 1.")] = 0.2,
) -> None:
    """Predict a recorded run, and print how far off p50 and p95 of TTFT and TPOT are."""
    from treeserve_simulator.comparison import predict, read_measured
    from treeserve_simulator.systems import find_system

    cluster = _guarded(lambda: _cluster(machine, verifiers, targets, settings), _BAD_INPUT)
    comparisons = _guarded(lambda: predict(read_measured(recorded), cluster, find_system(system)), _BAD_INPUT)
    for each in comparisons:
        print(f"{each.quantity}: measured {each.measured:.1f}, predicted {each.predicted:.1f}: {each.error:+.1%}")
    if any(abs(each.error) > most for each in comparisons):
        raise typer.Exit(1)


def _draw(requests: int, rate: float, pattern: str, mix: str, seed: int) -> list[TraceRequest]:
    from treeserve_simulator.arrivals import Arrivals, Pattern, draw_trace
    from treeserve_simulator.options import MIXES

    if pattern not in list(Pattern) or mix not in MIXES:
        raise failed(f"no such pattern or mix: {pattern}, {mix}; there are {', '.join([*Pattern, *MIXES])}", _BAD_INPUT)
    peak = 2.0 if pattern == Pattern.DIURNAL else 3.0
    return draw_trace(Arrivals(requests, rate, MIXES[mix], Pattern(pattern), peak=peak), seed)


def _cluster(machine: Path | None, verifiers: int, targets: list[str] | None, settings: list[str] | None) -> Cluster:
    from treeserve_simulator.costs import DEFAULT_MACHINE, MachineModel
    from treeserve_simulator.options import parse_settings, parse_targets
    from treeserve_simulator.systems import Cluster

    parsed = parse_settings(settings or ())
    return Cluster(
        MachineModel.read(machine or DEFAULT_MACHINE),
        verifiers,
        parse_targets(targets or ()),
        verifier=parsed["verifier"],
        router=parsed["router"],
    )


def _guarded(work: Callable[[], T], code: int = 1) -> T:
    """What `work` returns; an expected error ends the command with its message and this exit status."""
    try:
        return work()
    except (TreeserveError, OSError, ValueError) as error:
        raise failed(error, code) from None
