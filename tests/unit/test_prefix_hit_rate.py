"""What a conversation's next turn finds does not depend on how its last one was decoded: with drafts or without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from support.ledger_model import LedgerKv
from support.sequences import EOS, VOCAB, make_sequence

from treeserve_core.tree import TokenTree
from treeserve_engine.batch import ForwardBatch
from treeserve_engine.runner import ModelRunner
from treeserve_verifier.executor import NO_PLAIN_RUN, PlainRun, StepExecutor
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.step_plan import PlannedSequence, StepPlan

SIZE = 4


class Script:
    """A target that says one text, whatever it is shown."""

    config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=1 << 20)

    def __init__(self) -> None:
        self.text: list[int] = []

    def new_kv(self, num_blocks: int, block_size: int) -> LedgerKv:
        return LedgerKv(num_blocks, block_size)

    def forward(self, batch: ForwardBatch, kv: LedgerKv) -> npt.NDArray[np.float32]:
        logits = np.zeros((len(batch.logits_indices), VOCAB), np.float32)
        for row, position in enumerate(batch.positions[batch.logits_indices]):
            logits[row, self.text[position + 1] if position + 1 < len(self.text) else 0] = 1.0
        return logits


async def decode(executor: StepExecutor, runner: ModelRunner, sequence: Sequence, draft: str, text: list[int]) -> int:
    """Run a sequence to its end. Returns what it found when it began."""
    found = runner.blocks.add(sequence.seq_id, sequence.tokens)
    rest = len(sequence.tokens) - found
    if rest > 1:
        await step(executor, runner, PlannedSequence(sequence, rest, TokenTree.root_only(sequence.tokens[-1])))
    while sequence.sampler.finish_reason is None:
        right = text[len(sequence.tokens) : len(sequence.tokens) + 5]
        await step(executor, runner, PlannedSequence(sequence, 1, grown(sequence.tokens[-1], right, draft)), draft)
        assert runner.blocks.computed_len(sequence.seq_id) == len(sequence.tokens) - 1
    runner.blocks.free(sequence.seq_id)
    runner.blocks.check_integrity()
    return found


def grown(root: int, right: list[int], draft: str) -> TokenTree:
    if draft == "right":
        return TokenTree.chain([root, *right])
    if draft == "beside wrong ones":
        tokens, parents, parent = [root], [-1], 0
        for token in right:
            tokens += [(token + 1) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return TokenTree(tuple(tokens), tuple(parents))
    return TokenTree.root_only(root)


async def step(executor: StepExecutor, runner: ModelRunner, planned: PlannedSequence, draft: str = "") -> None:
    runner.blocks.reserve(planned.sequence.seq_id, planned.rows)
    then = PlainRun(3, lambda: True) if draft == "plain runs" else NO_PLAIN_RUN
    for done in await executor.run(StepPlan((planned,)), frozenset(), lambda: None, then):
        (result,) = done.results
        assert result.error is None and result.outcome is not None
        planned.sequence.tokens.extend(result.outcome.token_ids)


async def conversation(draft: str, first: int, ends: str) -> list[int]:
    """What each of several turns finds."""
    script, found = Script(), []
    runner = ModelRunner(script, 64, SIZE)
    history: list[int] = []
    with ThreadPoolExecutor(1) as thread:
        executor = StepExecutor(runner, thread, VOCAB)
        for turn in range(4):
            answer = [(3 * turn + i) % 90 for i in range(9 + turn)]
            prompt = [*history, *range(first)]
            script.text = [*prompt, *answer, EOS]
            limit = 50 if ends == "eos" else len(answer)
            sequence = make_sequence(prompt, max_tokens=limit)
            found.append(await decode(executor, runner, sequence, draft, script.text))
            assert sequence.tokens == (script.text if ends == "eos" else script.text[:-1])
            history = sequence.tokens
    assert runner.blocks.free_blocks == 64
    return found


@pytest.mark.parametrize("ends", ["eos", "length"])
async def test_turns_find_as_much_with_drafts_as_without(ends: str) -> None:
    """At every place of the last token in its block, and also where it was drafted and accepted."""
    for first in range(3, 3 + SIZE):
        plain = await conversation("none", first, ends)
        assert plain[0] == 0 and all(found > 0 for found in plain[1:])
        for draft in ("right", "beside wrong ones", "plain runs"):
            assert await conversation(draft, first, ends) == plain, draft
