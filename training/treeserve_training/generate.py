"""Generates training data: prompts of many kinds, and what the target answers to them.

python -m treeserve_training.generate MODEL_FOLDER --out DATA --tokens 2500000 --threads 2
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Annotated, Any

import typer

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.loading import load_model
from treeserve_engine.made_once import default_cache_dir
from treeserve_engine.precision import AUTO, choose_precision
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.answering import Answerer
from treeserve_training.prompts import Message
from treeserve_training.records import ShardWriter, read_counts
from treeserve_training.shard_maker import ShardMaker

_WIDTH = 64  # sequences side by side
_REPORT_SECONDS = 15.0


@dataclass(frozen=True)
class _Recipe:
    """What a shard's content follows from, besides its index."""

    model_folder: Path
    cache_dir: Path
    seed: int
    prompts: tuple[tuple[Message, ...], ...]  # a user's; if there are none, prompts are made here


def generate_data(
    model_folder: Path,
    out: Path,
    *,
    tokens: int,
    threads: int,
    cache_dir: Path,
    seed: int = 0,
    prompts_jsonl: Path | None = None,
    progress: Callable[[str], None],
) -> None:
    """Fill a data folder until it holds so many output tokens, going on where an interrupted call stopped.

    Args:
        model_folder: of the target.
        out: the data folder.
        tokens: output tokens, those of shards that are there already included.
        threads: processes of one thread each: that is faster than one process with as many threads.
        cache_dir: where int8 weights are kept.
        seed: equal seeds give equal shards.
        prompts_jsonl: a user's own prompts in place of those made here: {"messages": [...]} or {"prompt": ...} a line.
            All are answered greedily first, then at temperature 1 as often as it takes.
        progress: told in a line, every few seconds.

    Raises:
        InvalidArgumentError: if the folder holds other data, the prompts cannot be read, or the model is not supported.
    """
    prompts = () if prompts_jsonl is None else _read_prompts(prompts_jsonl)
    recipe = _Recipe(model_folder, cache_dir, seed, prompts)
    choose_precision(model_folder, AUTO, AUTO, "cpu")  # refuses here what the workers could not run
    tokenizer = Tokenizer.from_folder(model_folder)
    shards = ShardWriter(
        out,
        {
            "model": model_folder.name,
            "tokenizer": tokenizer.hash,
            "vocab_size": tokenizer.vocab_size,
            "seed": seed,
            "prompts": "made" if prompts_jsonl is None else _digest(prompts),
        },
    )
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    generated = context.Value("q", 0)
    pool = ProcessPoolExecutor(threads, context, _start_worker, (recipe, shards, generated))
    try:
        _fill(pool, shards, _Progress(tokens, Counter(read_counts(out)), generated, progress), threads)
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # rather than wait for its shard
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class _Progress:
    """How far a run is."""

    def __init__(
        self, target: int, counts: Counter[str], generated: Synchronized[int], tell: Callable[[str], None]
    ) -> None:
        self._target = target
        self._counts = counts
        self._generated = generated
        self._tell = tell
        self._last = time.monotonic(), 0

    @property
    def is_done(self) -> bool:
        return self._counts["tokens"] >= self._target

    def add(self, counts: Counter[str]) -> None:
        self._counts += counts

    def report(self) -> None:
        (before, had), now, has = self._last, time.monotonic(), self._generated.value
        self._last = now, has
        rate = (has - had) / max(now - before, 1e-9)
        dropped = self._counts["loops"] / max(self._counts["samples"], 1)
        self._tell(
            f"{self._counts['tokens']:,} of {self._target:,} tokens, {self._counts['samples']:,} samples, "
            f"{dropped:.0%} cut at a loop, {rate:,.0f} tokens/s"
        )


def _fill(pool: ProcessPoolExecutor, shards: ShardWriter, progress: _Progress, threads: int) -> None:
    missing = (index for index in count() if not shards.has(index))
    running: set[Future[Counter[str]]] = set()
    while not progress.is_done:
        while len(running) < threads:
            running.add(pool.submit(_make_shard, next(missing)))
        done, running = wait(running, _REPORT_SECONDS, FIRST_COMPLETED)
        for future in done:
            progress.add(_counts_of(future))
        progress.report()
    for future in running:
        progress.add(_counts_of(future))
    progress.report()


def _counts_of(made: Future[Counter[str]]) -> Counter[str]:
    counts = made.result()
    if not counts["samples"]:
        raise InvalidArgumentError("prompts", f"no answer to a whole shard of them is of use: {dict(counts)}")
    return counts


@dataclass(frozen=True)
class _Worker:
    maker: ShardMaker
    shards: ShardWriter
    prompts: tuple[tuple[Message, ...], ...]


_worker: _Worker  # of this process


def _start_worker(recipe: _Recipe, shards: ShardWriter, generated: Synchronized[int]) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    parent = multiprocessing.parent_process()

    def on_tokens(n: int) -> None:
        with generated.get_lock():
            generated.value += n
        if parent is not None and not parent.is_alive():
            sys.exit("the parent process is gone")

    tokenizer = Tokenizer.from_folder(recipe.model_folder)
    model = load_model(recipe.model_folder, dtype=AUTO, device="cpu", threads=1, cache_dir=recipe.cache_dir)
    answerer = Answerer(model, tokenizer.vocab_size, tokenizer.eos_token_ids, width=_WIDTH, on_tokens=on_tokens)
    _worker = _Worker(ShardMaker(tokenizer, answerer, recipe.seed), shards, recipe.prompts)


def _make_shard(index: int) -> Counter[str]:
    """Make a shard and write it, if there is anything in it; its counts."""
    prompts = _worker.prompts
    samples, counts = _worker.maker.make_from(prompts, index) if prompts else _worker.maker.make(index)
    if samples:
        _worker.shards.write(index, samples, counts)
    return counts


def _read_prompts(path: Path) -> tuple[tuple[Message, ...], ...]:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    prompts = tuple(_prompt_of(line, f"{path}, line {number}") for number, line in lines if line.strip())
    if not prompts:
        raise InvalidArgumentError("prompts", f"{path} holds none")
    return prompts


def _digest(prompts: tuple[tuple[Message, ...], ...]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def _prompt_of(line: str, where: str) -> tuple[Message, ...]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError("prompts", f"{where} is not JSON: {error}") from error
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return ({"role": "user", "content": entry["prompt"]},)
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InvalidArgumentError("prompts", f"{where} has neither a prompt nor messages with role and content")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _main(
    model_folder: Path,
    out: Annotated[Path, typer.Option(help="The data folder.")],
    tokens: Annotated[int, typer.Option(help="Output tokens to generate.")] = 2_500_000,
    threads: Annotated[int, typer.Option(help="Processes of one thread each.")] = 1,
    seed: int = 0,
    prompts: Annotated[Path | None, typer.Option(help="A JSONL file of prompts to use in place of made ones.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where int8 weights are kept.")] = None,
) -> None:
    """Generate training data from a model's own answers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    generate_data(
        model_folder,
        out,
        tokens=tokens,
        threads=threads,
        cache_dir=cache_dir or default_cache_dir(),
        seed=seed,
        prompts_jsonl=prompts,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    typer.run(_main)
