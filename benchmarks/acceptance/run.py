"""`make bench-acceptance`: how much of what is drafted gets accepted, and what speed follows.

    python -m benchmarks.acceptance [--quick] [--live] [--prompts FILE.jsonl] [--json FILE]

Plain outputs of the model are recorded once and kept in the cache; drafters are then replayed along them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.acceptance import live, report, tables
from benchmarks.acceptance.configurations import MERGED, Found, find_configurations
from benchmarks.acceptance.costs import FLAT_GPU, CostTable
from benchmarks.acceptance.features import RecordedFeatures
from benchmarks.acceptance.passes import (
    GREEDY,
    LOOPING,
    MODES,
    SAMPLED,
    TEMPERATURES,
    UNCOUPLED,
    Passes,
    Target,
    in_turns,
)
from benchmarks.acceptance.record import PlainOutput, Prompt, Recorder, model_key
from benchmarks.acceptance.tasks import TASKS, own_prompts, prompts_of_file
from benchmarks.peers.process import ROOT
from benchmarks.peers.run import machine, make_settings, rounded, without_paths, without_root
from benchmarks.peers.tasks import Conversation
from benchmarks.terminal import make_console
from benchmarks.treeserve_set import add_treeserve_set, name_value
from treeserve_engine.interface import Model
from treeserve_engine.loading import load_model
from treeserve_engine.runner import ModelRunner
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.loops import loop_start
from treeserve_training.target_features import TargetFeatures
from treeserve_verifier.config import default_threads

RESULTS = ROOT / "benchmarks" / "results" / "acceptance.json"
_LONGEST_PROMPT = 2048


@dataclass(frozen=True)
class Options:
    """The command line.

    Attributes:
        nodes: budgets, ascending.
        per_task: most prompts of each task.
        drafters: folder of trained drafters for all configurations; None for the shipped ones.
        ssms: folder of the draft models of `ssm1` to `ssm5`; None for the same.
        ssm_width: nodes that a draft model or head expands per level, and children of each; None for the default.
        also: folders of more draft models, by the name of their configuration.
        head: folder of a head that is measured alone; None for that of `drafters`, if it has one.
        corpus: for the corpus source; None to leave it out.
        only: configurations to run; empty for all.
    """

    nodes: tuple[int, ...]
    max_tokens: int
    per_task: int
    dtype: str
    threads: int
    prompts: tuple[Path, ...]
    drafters: Path | None
    ssms: Path | None
    ssm_width: int | None
    also: Mapping[str, Path]
    head: Path | None
    corpus: Path | None
    only: frozenset[str]
    live_rounds: int
    live_per_task: int
    treeserve_set: tuple[str, ...]
    json: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Record, replay, print, and write the JSON."""
    options, ran_on, console = parse_options(argv), machine(), make_console()
    settings = make_settings(options.threads, 1)
    folder, cache = ROOT / settings.folder, ROOT / settings.cache
    tokenizer = Tokenizer.from_folder(folder)

    def load() -> Model:
        return load_model(folder, dtype=options.dtype, device="cpu", threads=options.threads, cache_dir=cache)

    recorder = Recorder(
        load,
        model_key(folder, options.dtype, cache),
        cache / "acceptance",
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        max_tokens=options.max_tokens,
        report=lambda line: status.update(line),
    )
    with console.status("recording plain outputs") as status:
        outputs = record(recorder, tokenizer, options)
    # One thread computes in this one: its computing time tells what a step costs where nothing else runs.
    clock_s = time.thread_time if options.threads == 1 else time.perf_counter
    costs = (CostTable.measure(ModelRunner(load(), 32, 16), clock_s), CostTable.read(FLAT_GPU))
    found = configurations(folder, cache, options)
    target = Target(folder, tokenizer.eos_token_ids)
    longest = max(len(o.prompt_ids) + len(o.output_ids) for ours in outputs.values() for o in ours)
    features = RecordedFeatures(lambda: TargetFeatures(folder, cache, threads=options.threads, max_tokens=longest))
    passes = Passes(target, outputs, lambda line: console.print(line, highlight=False), features)
    run = list(passes.run(found.configurations, options.nodes))
    for configuration in found.configurations:
        if configuration.name == MERGED:
            run += [passes.one(m, configuration, options.nodes[-1], table) for m in MODES for table in costs]
    result = {
        "command": ["python", "-m", "benchmarks.acceptance", *without_paths(argv or sys.argv[1:])],
        "machine": ran_on,
        "versions": {name: version(name) for name in ("treeserve", "numpy", "torch")},
        "model": {"folder": settings.folder, "dtype": options.dtype, "threads": options.threads},
        "max_tokens": options.max_tokens,
        "prompts": {task: sum(_task(o) == task for o in outputs[GREEDY]) for task in map(_task, outputs[GREEDY])},
        "costs": [{"name": t.name, "origin": t.origin, "ms_by_rows": t.model.table} for t in costs],
        "configurations": {c.name: c.sources for c in found.configurations},
        "skipped": found.skipped,
        **report.acceptance(run, TASKS, costs),
        "planned": report.planned(run, TASKS, costs),
        "looping": report.looping(outputs, run, options.nodes[-1]),
    }
    result["widths"] = report.widths(result, options.also)
    if options.live_rounds:
        plan = live.LivePlan(options.live_rounds, options.live_per_task, options.max_tokens)
        result["live"] = live.measure(settings, options.dtype, options.treeserve_set, outputs, plan, console.print)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(without_root(json.dumps(rounded(result), indent=1)) + "\n")
    tables.show(result, console)
    console.print(f"written: {options.json}", highlight=False)
    return 0


def record(recorder: Recorder, tokenizer: Tokenizer, options: Options) -> dict[str, list[PlainOutput]]:
    """Plain outputs by mode, tasks in turn, those that loop with a task of their own."""
    tasks = own_prompts()
    for path in options.prompts:
        tasks |= prompts_of_file(path)
    outputs: dict[str, list[PlainOutput]] = {}
    for mode in (GREEDY, SAMPLED):
        prompts = list(_prompts(tasks, tokenizer, TEMPERATURES[mode], options.per_task))
        outputs[mode] = in_turns([_flagged(output) for output in recorder.record(prompts)])
    return outputs | {UNCOUPLED: outputs[SAMPLED]}


def _prompts(
    tasks: Mapping[str, Sequence[Conversation]], tokenizer: Tokenizer, temperature: float, per_task: int
) -> Iterator[Prompt]:
    for task, conversations in tasks.items():
        for seed, conversation in enumerate(conversations[:per_task], start=1):
            token_ids = tuple(tokenizer.render_chat(conversation))
            if len(token_ids) <= _LONGEST_PROMPT:
                yield Prompt(task, token_ids, temperature, seed)


def _flagged(output: PlainOutput) -> PlainOutput:
    return output if loop_start(output.output_ids) is None else replace(output, kind=output.kind + LOOPING)


def _task(output: PlainOutput) -> str:
    return output.kind.removesuffix(LOOPING)


def configurations(folder: Path, cache: Path, options: Options) -> Found:
    """What can be built of what was asked for."""

    def drafting(path: Path | None) -> dict[str, Any]:
        return {} if path is None else {"drafter_folder": path}

    width = {} if options.ssm_width is None else {"ssm_width": options.ssm_width}
    found = find_configurations(
        folder,
        {"cache_dir": cache, **drafting(options.drafters), **width},
        drafting(options.ssms),
        {name: drafting(path) for name, path in options.also.items()},
        options.corpus,
        None if options.head is None else drafting(options.head),
    )
    if not options.only:
        return found
    return Found(tuple(c for c in found.configurations if c.name in options.only), found.skipped)


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line. Raises SystemExit for what cannot be read."""
    parser = argparse.ArgumentParser(prog="benchmarks.acceptance", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="two prompts of each task, 32 tokens, 8 nodes: does everything run?")
    add("--nodes", default="4,8,12,24", help="node budgets")
    add("--max-tokens", type=int, default=128, help="of each output (128)")
    add("--per-task", type=int, default=1000, help="most prompts of each task")
    add("--dtype", default="int8", help="the target's (int8)")
    add("--threads", type=int, default=default_threads(), help="of the target; by default as `treeserve up`")
    add("--prompts", type=Path, action="append", default=[], help="more prompts: Spec-Bench, ShareGPT or plain JSONL")
    add("--drafters", type=Path, help="folder of trained drafters; without it the shipped ones")
    add("--ssms", type=Path, help="folder of the draft models of ssm1 to ssm5, if it is another")
    add("--head", type=Path, help="folder of a draft head that is not among --drafters, alone")
    add("--ssm-width", type=int, help="of draft models' and heads' trees; at 1 each proposes one sequence")
    add(
        "--also",
        action="append",
        default=[],
        type=name_value,
        metavar="NAME=FOLDER",
        help="one more draft model, alone",
    )
    add("--corpus", type=Path, help="file of `treeserve corpus build`, for the corpus source alone")
    add("--only", default="", help="configurations to run, comma-separated")
    add("--live", action="store_true", help="also measure a local cluster end to end, with speculation and without")
    add("--live-rounds", type=int, default=3, help="rounds of that, each with a fresh cluster (3)")
    add("--live-per-task", type=int, default=4, help="requests of each task in a round (4)")
    add_treeserve_set(parser, ", with --live")
    add("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    if args.quick:
        args.nodes, args.max_tokens, args.per_task, args.live_rounds, args.live_per_task = "8", 32, 2, 1, 1
    try:
        nodes = tuple(sorted({int(n) for n in args.nodes.split(",")}))
    except ValueError:
        parser.error(f"--nodes: {args.nodes!r} are no numbers")
    if nodes[0] < 1:
        parser.error("--nodes: a budget is at least 1")
    if args.ssm_width is not None and args.ssm_width < 1:
        parser.error("--ssm-width is at least 1")
    return Options(
        nodes=nodes,
        max_tokens=args.max_tokens,
        per_task=args.per_task,
        dtype=args.dtype,
        threads=args.threads,
        prompts=tuple(args.prompts),
        drafters=args.drafters,
        ssms=args.ssms,
        ssm_width=args.ssm_width,
        head=args.head,
        also={name: Path(folder) for name, _, folder in (pair.partition("=") for pair in args.also)},
        corpus=args.corpus,
        only=frozenset(filter(None, args.only.split(","))),
        live_rounds=args.live_rounds if args.live else 0,
        live_per_task=args.live_per_task,
        treeserve_set=tuple(args.treeserve_set),
        json=args.json,
    )
