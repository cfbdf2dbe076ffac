"""`make bench-peers`: measures treeserve and its peers in one run and writes benchmarks/results/peers.json.

    python -m benchmarks.peers.run [--quick] [--dtype int8] [--treeserve-set verifier.threads=2] [--json FILE]

tokens_per_s is output tokens over the time in which requests run, prefill included; every request has the same length.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import bare_engine, report, treeserve
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.llama_cpp import NGRAM as LLAMA_NGRAM
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.peer import Settings
from benchmarks.peers.process import ROOT
from benchmarks.peers.rounds import Group, Plan, Rounds
from benchmarks.peers.tasks import Request, load_tasks, select_requests
from benchmarks.peers.vllm import NGRAM as VLLM_NGRAM
from benchmarks.peers.vllm import Vllm
from benchmarks.treeserve_set import add_treeserve_set
from treeserve_cli.layout import DEFAULT_MODEL
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_text.tokenizer import Tokenizer

SYSTEMS = ("treeserve_on", "treeserve_off", "llama_cpp", "llama_cpp_spec", "vllm", "vllm_ngram", "hf", "hf_lookup")
FULL = Plan(rounds=3, max_tokens=64, requests={1: 18, 8: 16, 32: 32})
QUICK = Plan(rounds=1, max_tokens=32, requests={1: 12, 8: 8, 32: 32})
RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
_KV_TOKENS = 16384


@dataclass(frozen=True)
class Options:
    """The command line."""

    quick: bool
    dtype: str
    threads: int
    treeserve_set: tuple[str, ...]
    systems: tuple[str, ...]
    json: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; returns 1 if treeserve itself could not be measured."""
    options, ran_on = parse_options(argv), machine()
    plan = QUICK if options.quick else FULL
    settings = make_settings(options.threads, max(plan.requests))
    groups = make_groups(settings, options)
    skipped = missing_systems(groups) | {s: "not asked for" for s in SYSTEMS if s not in options.systems}
    for system, reason in skipped.items():
        print(f"{system} is skipped: {reason}")
    tokenizer = Tokenizer.from_folder(ROOT / settings.folder)
    tasks = load_tasks()

    def requests_of(round_index: int, batch: int) -> list[Request]:
        count = plan.requests[batch]
        first = round_index * -(-plan.requests[1] // len(tasks))  # at batch size 1 each round has fresh prompts
        return select_requests(tasks, tokenizer.render_chat, count, first, plan.max_tokens)

    usable = [g for g in groups if not any(s in skipped for p in g for s in p.systems)]
    rounds = Rounds(plan, usable, requests_of, lambda line: print(line, flush=True))
    rounds.run()
    result = {
        "command": ["python", "-m", "benchmarks.peers.run", *without_paths(argv or sys.argv[1:])],
        "machine": ran_on,
        "plan": asdict(plan) | {"quick": options.quick, "kv_tokens": _KV_TOKENS},
        "model": {"gguf": settings.gguf, "dequantised": settings.folder},
        **summary(rounds, usable, skipped | rounds.skipped, plan, tokenizer.eos_token_ids),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(without_root(json.dumps(rounded(result), indent=1)) + "\n")
    print_table(result)
    print(f"written: {options.json}")
    return 1 if rounds.skipped.keys() & set(treeserve.Treeserve.systems) else 0


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line. Raises SystemExit for what cannot be read."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round, to see that everything works")
    parser.add_argument("--dtype", default="int8", help="treeserve's (int8)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of every peer; treeserve has its own default"
    )
    add_treeserve_set(parser)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated; by default all")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the result goes")
    args = parser.parse_args(argv)
    systems = tuple(args.systems.split(","))
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}")
    return Options(args.quick, args.dtype, args.threads, tuple(args.treeserve_set), systems, args.json)


def make_settings(threads: int, max_batch: int) -> Settings:
    """Where things are on this machine, relative to the repository where they lie in it."""
    cache = Path(os.environ.get("TREESERVE_CACHE", ROOT / ".cache"))
    gguf = cache / DEFAULT_MODEL
    if not gguf.exists():
        raise SystemExit(f"no {DEFAULT_MODEL} in {cache}: `make setup` fetches it")
    folder = prepare_checkpoint(gguf, cache, print)
    return Settings(
        gguf=_from_root(gguf),
        folder=_from_root(folder),
        cache=_from_root(cache),
        tools=".tools/peers",
        threads=threads,
        kv_tokens=_KV_TOKENS,
        max_batch=max_batch,
    )


def make_groups(settings: Settings, options: Options) -> list[Group]:
    """The peers that were asked for; those of a group are measured request by request."""
    service = treeserve.Treeserve(settings, options.dtype, options.treeserve_set)
    groups: list[Group] = [
        (service, bare_engine.BareEngine(settings, options.dtype, service.kv_dtype, service.threads)),
        (LlamaCpp(settings, "llama_cpp"),),
        (LlamaCpp(settings, "llama_cpp_spec", LLAMA_NGRAM),),
        (Vllm(settings, "vllm"),),
        (Vllm(settings, "vllm_ngram", VLLM_NGRAM),),
        (HuggingFace(settings),),
    ]
    return [group for group in groups if any(s in options.systems for s in group[0].systems)]


def missing_systems(groups: Sequence[Group]) -> dict[str, str]:
    """Systems that cannot run here, with the reason."""
    return {
        system: reason
        for group in groups
        for peer in group
        if (reason := peer.missing()) is not None
        for system in peer.systems
    }


def summary(
    rounds: Rounds, groups: Sequence[Group], skipped: dict[str, str], plan: Plan, end_ids: Sequence[int]
) -> dict[str, Any]:
    """The figures of the report. A batch size that a system does not take is null, with the reason in `unsupported`."""
    cells, on, off = rounds.cells, treeserve.ON, treeserve.OFF
    peers = {s: p for g in groups for p in g for s in p.systems if s in SYSTEMS and s not in skipped}
    reasons = {s: {str(b): p.unsupported(s, b) for b in plan.requests} for s, p in peers.items()}
    shown = [cell for cell in cells if cell.system in SYSTEMS]
    speeds = report.medians(shown, lambda cell: cell.tokens_per_s)
    for system, by_batch in reasons.items():
        speeds[system] = {batch: speeds.get(system, {}).get(batch) for batch in by_batch}
    return {
        "skipped": skipped,
        "unsupported": {s: why for s, r in reasons.items() if (why := {b: w for b, w in r.items() if w})},
        "tokens_per_s": {system: speeds[system] for system in SYSTEMS if system in speeds},
        "tokens_per_s_by_task": report.by_task(shown),
        "tokens_per_s_by_round": report.by_round(shown),
        "ttft_ms": report.medians(shown, lambda cell: cell.ttft_ms),
        "tpot_ms": report.medians(shown, lambda cell: cell.tpot_ms),
        "on_over_off": report.ratios(cells, on, off),
        "on_equals_off": report.equal_share(cells, on, off),
        "tokens_per_step": report.tokens_per_step(cells, on),
        "share_past_end": report.share_past_end(cells, off, end_ids),
        "service_overhead_batch1": report.overhead(cells, off, bare_engine.SYSTEM),
        "start_up_s": {s: statistics.median(v) for s, v in rounds.start_up_s.items() if s in peers},
        "memory_mb": {s: memory_summary(rounds, s) for s in peers if s in rounds.memory},
        "threads": {s: p.threads for s, p in peers.items()},
        "versions": {s: p.version() for s, p in peers.items()},
        "commands": {s: p.command for s, p in peers.items()},
    }


def memory_summary(rounds: Rounds, system: str) -> dict[str, Any]:
    """Peak resident sets of a system's processes and their sum, which counts shared pages once for each process."""
    processes = rounds.memory[system]
    pss = [p.pss_mb for p in processes]
    by_process: dict[str, float] = {}
    for p in processes:
        by_process[p.name] = by_process.get(p.name, 0.0) + p.peak_rss_mb
    return {
        "peak_rss": sum(p.peak_rss_mb for p in processes),
        "pss": None if None in pss else sum(value for value in pss if value is not None),
        "peak_rss_by_process": by_process,
    }


def machine() -> dict[str, Any]:
    """What it ran on."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    flags = next((line.split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "isa": [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
    }


def print_table(result: dict[str, Any]) -> None:
    """Throughput of all systems."""
    batches = [str(batch) for batch in result["plan"]["requests"]]
    print(f"{'tokens/s at batch':<18}" + "".join(f"{batch:>9}" for batch in batches))
    for system, row in result["tokens_per_s"].items():
        print(f"{system:<18}" + "".join(f"{row[b]:9.1f}" if row[b] is not None else f"{'-':>9}" for b in batches))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _from_root(path: Path) -> str:
    """A path as programs get it that run in the repository's root."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def rounded(value: Any) -> Any:
    """Four significant digits are more than such a measurement holds."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def without_root(text: str) -> str:
    """A text without this machine's paths."""
    return text.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")


def without_paths(arguments: Sequence[str]) -> list[str]:
    """A command's arguments without this machine's paths."""
    return [without_root(argument) for argument in arguments]


if __name__ == "__main__":
    sys.exit(main())
