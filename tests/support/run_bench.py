"""Sequences that decode in native runs beside plain decoding, which says what their tokens are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from support.decode_runs import (
    KINDS,
    Drafted,
    Plain,
    ScriptedDrafter,
    scattered_runner,
    scripted_tree,
)
from support.int8_decoders import NativeModel, Sizes, random_model
from support.int8_twin import PlainModel
from support.plain_decoding import assert_same_bits, prefill
from treeserve_core.tree import TokenTree
from treeserve_engine.batch import SequenceRows
from treeserve_engine.runner import ModelRunner
from treeserve_kernels.cpu.decode_run import Choose, Ran, RunSequence, RunTerms
from treeserve_kernels.cpu.sampling import find_rivals

SIZES = Sizes(num_layers=3)
VOCAB = 197  # the head has 203 outputs
PROMPT_LENS = (5, 1, 13, 2, 8, 21, 3, 4)
FREE = {1: 1.0, 2**31: 1.0}
STAIRS = {1: 10.0, 4: 11.0, 8: 13.0, 16: 19.0, 32: 33.0}
TABLES = (
    {rows: 5.0 + 0.5 * rows for rows in range(1, 129)},
    {1: 5.0, 4: 5.5, 8: 7.0, 16: 10.0, 32: 17.0},
    {1: 10.0, 64: 10.0},
    {3: 10.0, 6: 11.0, 9: 30.0, 40: 31.0},
    {1: 20.0, 2: 20.0, 5: 21.5, 6: 29.0, 64: 80.0, 256: 81.0},
    {1: 1e9, 2**31: 1e9},
)


@cache
def weights() -> PlainModel:
    return random_model(SIZES, 3)


@cache
def native_model(kv_dtype: str) -> NativeModel:
    """All that no row may see is NaN in its caches."""
    return NativeModel(weights(), kv_dtype, is_poisoned=True)


@cache
def plain_model(kv_dtype: str) -> NativeModel:
    return NativeModel(weights(), kv_dtype)


@cache
def plain(index: int, temperature: float = 0.0, kv_dtype: str = "float32") -> Plain:
    rng = random.Random(index)
    prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_LENS[index])]
    return Plain(plain_model(kv_dtype), prompt, temperature, 2**64 - 1 - index, VOCAB)


@cache
def long_plain(length: int, temperature: float = 0.0, kv_dtype: str = "float32") -> Plain:
    """With a prompt of so many tokens."""
    rng = random.Random(length)
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    return Plain(plain_model(kv_dtype), prompt, temperature, 2**63 + length, VOCAB)


@dataclass
class Live:
    """A sequence of a bench: what runs are told of it, and learn."""

    plain: Plain
    tokens: list[int]
    unread: int = 0  # tokens at the end without KV, the root the last of them; 0 for one that decodes
    tokens_left: int = 10**6
    end_ids: tuple[int, ...] = ()
    asks: bool = False
    is_drafted: bool = True
    most_nodes: int = 30
    slack_ms: float = math.inf
    token_ms: float = math.inf
    reserve_ms: float = 0.0
    calibration: float = 1.0
    verified: float = 4.0

    @property
    def computed_len(self) -> int:
        return len(self.tokens) - max(self.unread, 1)


class Bench:
    """Sequences with their prompts computed but for the last token, which run as they are told.

    Args:
        unread: of each sequence so many tokens at the end of the prompt are for runs to compute.
    """

    def __init__(
        self,
        plains: Sequence[Plain],
        kv_dtype: str = "float32",
        block_size: int = 7,
        model: NativeModel | None = None,
        unread: Sequence[int] = (),
    ) -> None:
        self.model = model or native_model(kv_dtype)
        self.plain_model = plain_model(kv_dtype)
        self.runner = scattered_runner(self.model, random.Random(block_size), block_size)
        counts = unread or [0] * len(plains)
        self.live = [Live(each, list(each.prompt), count) for each, count in zip(plains, counts, strict=True)]
        self.chosen: list[tuple[int, int]] = []  # who asked for a token, and after how many
        self._raised: list[Exception] = []
        for seq_id, each in enumerate(self.live):
            self.runner.blocks.add(seq_id)
            if computed := each.tokens[: each.computed_len]:
                prefill(self.runner, seq_id, computed, 6)

    def run(
        self,
        drafter: ScriptedDrafter | None = None,
        *,
        positions: int | Mapping[int, int] = 60,
        only: Sequence[int] | None = None,
        **terms: Any,
    ) -> Ran:
        """One run, whose tokens are those of plain decoding."""
        running = range(len(self.live)) if only is None else only
        wanted = dict.fromkeys(running, positions) if isinstance(positions, int) else positions
        self.runner.blocks.reserve_ahead({seq_id: wanted[seq_id] for seq_id in running})
        of_each = [self._described(seq_id, drafter) for seq_id in running]
        if drafter is not None:
            drafter.tokens |= {seq_id: list(self.live[seq_id].tokens) for seq_id in running}
            terms["drafter"] = drafter.structure
        defaults: dict[str, Any] = {"step_rows": 512, "cost_table": FREE, "max_steps": 64}
        ran = self.runner.decode(
            running, of_each, RunTerms(vocab_size=VOCAB, **defaults | terms), self._chooser(running)
        )
        if self._raised:
            raise self._raised[0]
        if drafter is not None:
            drafter.check()
        for seq_id, each in zip(running, ran.sequences, strict=True):
            live = self.live[seq_id]
            if live.unread:
                is_read = each.num_read == live.unread
                assert 0 <= each.num_read <= live.unread
                assert len(each.token_ids) == (is_read and not each.has_failed)
            else:
                assert each.num_read == 0
            live.unread -= each.num_read
            self._take(live, each.token_ids)
            live.calibration, live.verified = each.calibration, each.verified
            assert each.has_failed or self.runner.blocks.computed_len(seq_id) == live.computed_len
            assert sum(record.emitted for record in each.records) == len(each.token_ids)
            assert len(each.records) == len(ran.steps)
        self.runner.blocks.check_integrity()
        return ran

    def _described(self, seq_id: int, drafter: ScriptedDrafter | None) -> RunSequence:
        live = self.live[seq_id]
        return RunSequence(
            num_tokens=len(live.tokens),
            root=live.tokens[-1],
            unread=live.tokens[len(live.tokens) - live.unread :],
            tokens_left=live.tokens_left,
            end_ids=live.end_ids,
            asks=live.asks,
            temperature=live.plain.temperature,
            seed=live.plain.seed,
            handle=seq_id if drafter is not None and live.is_drafted else None,
            most_nodes=live.most_nodes,
            slack_ms=live.slack_ms,
            token_ms=live.token_ms,
            reserve_ms=live.reserve_ms,
            calibration=live.calibration,
            verified=live.verified,
        )

    def _take(self, live: Live, new: Sequence[int]) -> None:
        base_len = len(live.tokens)
        assert list(new) == live.plain.tokens(base_len + len(new))[base_len:]
        live.tokens += new
        live.tokens_left -= len(new)

    def _chooser(self, running: Sequence[int]) -> Choose:
        """Chooses as plain decoding does, and nothing where logits are not finite. There must be reason to be asked."""
        before = {seq_id: list(self.live[seq_id].tokens) for seq_id in running}

        def choose(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
            live, tokens = self.live[running[place]], [*before[running[place]], *new]
            self.chosen.append((running[place], len(tokens)))
            if not np.isfinite(logits[:VOCAB]).all():
                return -1, False
            assert tokens == live.plain.tokens(len(tokens))
            assert_same_bits(logits[None], live.plain.after(len(tokens))[None])
            if not live.asks:
                temperature, seed = live.plain.temperature, live.plain.seed
                assert temperature > 0.0
                assert len(find_rivals(logits[:VOCAB].copy(), None, temperature, seed, len(tokens))) > 1
            token = live.plain.tokens(len(tokens) + 1)[-1]
            return token, token in live.end_ids

        def guarded(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
            try:
                return choose(place, new, logits)
            except Exception as error:
                self._raised.append(error)
                return -1, False

        return guarded

    def decode(self, count: int, drafter: ScriptedDrafter | None = None, **terms: Any) -> list[Ran]:
        """Runs, short and long ones, until every sequence has so many new tokens."""
        rng, all_ran = random.Random(count), []
        for each in self.live:
            each.tokens_left = count
        while only := [seq_id for seq_id, each in enumerate(self.live) if each.tokens_left]:
            ran = self.run(drafter, positions=rng.choice([1, 4, 20, 60]), only=only, **terms)
            assert ran.error is None and not ran.drafter_failed and ran.steps
            all_ran.append(ran)
            for seq_id, done in zip(only, ran.sequences, strict=True):
                assert done.has_ended == (not self.live[seq_id].tokens_left) and not done.has_failed
        return all_ran

    def check_kv(self) -> None:
        """What comes next is what it would be after a prefill of the same tokens, to the bit."""
        for seq_id, each in enumerate(self.live):
            fresh = ModelRunner(self.plain_model, 64, 16)
            fresh.blocks.add(0)
            expected = prefill(fresh, 0, each.tokens, 500)[-1:]
            missing = each.tokens[each.computed_len :]
            self.runner.blocks.reserve(seq_id, len(missing))
            (found,) = self.runner.forward([SequenceRows.from_chain(seq_id, missing, [len(missing) - 1])])
            self.runner.rollback(seq_id)
            assert_same_bits(found, expected)


def script(
    plains: Sequence[Plain], kinds: Sequence[str] = KINDS, seed: int = 0
) -> Callable[[int, list[int], int], TokenTree]:
    """Trees by handle, tokens so far and budget: the same for the same."""

    def tree(handle: int, tokens: list[int], budget: int) -> TokenTree:
        rng = random.Random(f"{seed} {handle} {len(tokens)} {budget}")
        ahead = plains[handle].tokens(len(tokens) + budget + 1)[len(tokens) :]
        return scripted_tree(rng, rng.choice(kinds), tokens[-1], ahead, budget, VOCAB)

    return tree


def drafter_of(tree: Callable[[int, list[int], int], TokenTree], **arguments: Any) -> ScriptedDrafter:
    return ScriptedDrafter(
        lambda handle, tokens, budget: Drafted.of(tree(handle, tokens, budget), len(tokens)), **arguments
    )


def nobody(place: int, new: Sequence[int], logits: npt.NDArray[np.float32]) -> tuple[int, bool]:
    """Whom to ask where nothing is asked."""
    raise AssertionError


SOUND: dict[str, Any] = {"num_tokens": 3, "root": 4, "tokens_left": 9, "end_ids": ()}
TERMS: dict[str, Any] = {"vocab_size": VOCAB, "step_rows": 8, "cost_table": FREE, "max_steps": 4}
