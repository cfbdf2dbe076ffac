"""Acceptance by hand-worked cases: where the walk stops, what it emits, and who wins when two ends meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.outcome import FinishReason
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_core.tree import TokenTree
from treeserve_engine.accept import SequenceSampler, accept
from treeserve_engine.next_token import NonFiniteLogitsError

VOCAB, PADDED, EOS = 10, 16, 9


def favour(token_id: int, *others: int) -> npt.NDArray[np.float32]:
    """Logits that prefer token_id, then the others in order; padding rows are the largest of all."""
    logits = np.zeros(PADDED, np.float32)
    for rank, favoured in enumerate((token_id, *others)):
        logits[favoured] = 10.0 - rank
    logits[VOCAB:] = 50.0
    return logits


def sampler(
    params: SamplingParams | None = None,
    *,
    prompt: tuple[int, ...] = (1, 2),
    generated: tuple[int, ...] = (),
    **stopping: Any,
) -> SequenceSampler:
    return SequenceSampler(
        params or SamplingParams(),
        StoppingCriteria(**{"max_tokens": 100, **stopping}),
        prompt,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        generated_token_ids=generated,
    )


class Rows:
    """Logits per node, remembering which were asked for."""

    def __init__(self, *rows: npt.NDArray[np.float32]) -> None:
        self._rows = rows
        self.asked: list[int] = []

    def __call__(self, node: int) -> npt.NDArray[np.float32]:
        self.asked.append(node)
        return self._rows[node]


#       2 (root)
#      /  \
#     3    4
#    / \    \
#   5   6    5
TREE = TokenTree((2, 3, 4, 5, 6, 5), (-1, 0, 0, 1, 1, 2))


def rows_for(**choice: int) -> Rows:
    """Rows of TREE: the token each node favours, named n0..n5; 0 by default."""
    return Rows(*(favour(choice.get(f"n{node}", 0)) for node in range(len(TREE))))


class TestWalk:
    def test_first_node_rejected(self) -> None:
        rows, s = rows_for(n0=7), sampler()
        out = accept(TREE, rows, s)
        assert (out.accepted_nodes, out.token_ids, out.finish_reason) == ((), (7,), None)
        assert rows.asked == [0]
        assert (s.output_len, s.last_token_id) == (1, 7)

    def test_last_node_rejected(self) -> None:
        rows = rows_for(n0=3, n1=7)
        out = accept(TREE, rows, sampler())
        assert (out.accepted_nodes, out.token_ids) == ((1,), (3, 7))
        assert rows.asked == [0, 1]

    def test_whole_path_accepted_and_a_bonus_token(self) -> None:
        rows = rows_for(n0=3, n1=6, n4=8)
        out = accept(TREE, rows, sampler())
        assert (out.accepted_nodes, out.token_ids) == ((1, 4), (3, 6, 8))
        assert rows.asked == [0, 1, 4]

    def test_the_second_branch(self) -> None:
        out = accept(TREE, rows_for(n0=4, n2=5, n5=1), sampler())
        assert (out.accepted_nodes, out.token_ids) == ((2, 5), (4, 5, 1))

    def test_only_node_rejected_and_accepted(self) -> None:
        tree = TokenTree.chain([2, 3])
        assert accept(tree, Rows(favour(4), favour(0)), sampler()).token_ids == (4,)
        assert accept(tree, Rows(favour(3), favour(0)), sampler()).token_ids == (3, 0)

    def test_root_only_tree_is_plain_decoding(self) -> None:
        out = accept(TokenTree.root_only(2), Rows(favour(5)), sampler())
        assert (out.accepted_nodes, out.token_ids) == ((), (5,))

    def test_padding_rows_are_never_emitted(self) -> None:
        params = SamplingParams(temperature=2.0, seed=3)
        for generated in range(20):
            s = sampler(params, generated=(2,) * generated)
            assert accept(TokenTree.root_only(2), Rows(favour(5)), s).token_ids[0] < VOCAB

    def test_a_drafted_padding_id_is_simply_never_reached(self) -> None:
        out = accept(TokenTree((2, 12, 3), (-1, 0, 0)), Rows(favour(3), favour(0), favour(0)), sampler())
        assert out.token_ids == (3, 0)

    def test_a_tie_goes_to_the_lowest_id_whatever_was_drafted(self) -> None:
        tied = favour(5)
        tied[4] = tied[5]
        out = accept(TokenTree.chain([2, 5]), Rows(tied, favour(0)), sampler())
        assert (out.accepted_nodes, out.token_ids) == ((), (4,))

    def test_a_tree_over_another_root_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the root is 3"):
            accept(TokenTree.root_only(3), Rows(favour(0)), sampler())

    def test_non_finite_logits_only_matter_where_the_walk_goes(self) -> None:
        broken = np.full(PADDED, np.nan, np.float32)
        tree = TokenTree.chain([2, 3])
        assert accept(tree, Rows(favour(4), broken), sampler()).token_ids == (4,)
        with pytest.raises(NonFiniteLogitsError):
            accept(tree, Rows(favour(3), broken), sampler())

    def test_non_finite_padding_is_ignored(self) -> None:
        logits = favour(5)
        logits[VOCAB:] = -np.inf
        assert accept(TokenTree.root_only(2), Rows(logits), sampler()).token_ids == (5,)


CHAIN = TokenTree.chain([2, 3, EOS, 4])


class TestEnds:
    def test_eos_inside_the_path_is_emitted_and_the_rest_dropped(self) -> None:
        rows = Rows(favour(3), favour(EOS), favour(4), favour(5))
        out = accept(CHAIN, rows, sampler())
        assert (out.accepted_nodes, out.token_ids, out.finish_reason) == ((1, 2), (3, EOS), FinishReason.STOP)
        assert rows.asked == [0, 1]

    def test_eos_as_a_leaf_gives_no_bonus(self) -> None:
        out = accept(TokenTree.chain([2, EOS]), Rows(favour(EOS), favour(4)), sampler())
        assert (out.accepted_nodes, out.token_ids, out.finish_reason) == ((1,), (EOS,), FinishReason.STOP)

    def test_eos_as_the_bonus_token(self) -> None:
        out = accept(TokenTree.chain([2, 3]), Rows(favour(3), favour(EOS)), sampler())
        assert (out.accepted_nodes, out.token_ids, out.finish_reason) == ((1,), (3, EOS), FinishReason.STOP)

    def test_ignore_eos_walks_on(self) -> None:
        rows = Rows(favour(3), favour(EOS), favour(4), favour(5))
        out = accept(CHAIN, rows, sampler(ignore_eos=True))
        assert (out.token_ids, out.finish_reason) == ((3, EOS, 4, 5), None)

    def test_a_stop_token_ends_with_eos_ignored(self) -> None:
        s = sampler(ignore_eos=True, stop_token_ids=(4,))
        out = accept(CHAIN, Rows(favour(3), favour(EOS), favour(4), favour(5)), s)
        assert (out.token_ids, out.finish_reason) == ((3, EOS, 4), FinishReason.STOP)

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
    def test_max_tokens_inside_the_path(self, max_tokens: int) -> None:
        tree = TokenTree.chain([2, 3, 4, 5])
        out = accept(tree, Rows(favour(3), favour(4), favour(5), favour(6)), sampler(max_tokens=max_tokens))
        assert out.token_ids == (3, 4, 5, 6)[:max_tokens]
        assert out.accepted_nodes == (1, 2, 3)[:max_tokens]
        assert out.finish_reason == FinishReason.LENGTH

    @pytest.mark.parametrize("stop_at", range(5))
    @pytest.mark.parametrize("cap_at", range(5))
    @pytest.mark.parametrize("drafted", range(5))
    @pytest.mark.parametrize("kind", ["stop_token", "stop_string"])
    def test_an_earlier_or_simultaneous_stop_wins_over_the_cap(
        self, stop_at: int, cap_at: int, drafted: int, kind: str
    ) -> None:
        """Stop at every offset crossed with the cap at every offset, for every length of the accepted path."""
        plain = (3, 4, 5, 6, 7)
        rows = [favour(token_id) for token_id in plain]
        stopping: dict[str, Any] = {"max_tokens": cap_at + 1}
        should_stop: Callable[[int], bool] | None = None
        if kind == "stop_token":
            stopping["stop_token_ids"] = (plain[stop_at],)
        else:
            should_stop = plain[stop_at].__eq__
        s, emitted = sampler(**stopping), ()
        while s.finish_reason is None:
            done = s.output_len
            tree = TokenTree.chain([s.last_token_id, *plain[done : done + drafted]])
            out = accept(tree, lambda node, done=done: rows[done + node], s, should_stop)  # type: ignore[misc]
            emitted += out.token_ids
        assert emitted == plain[: min(stop_at, cap_at) + 1]
        assert out.finish_reason == (FinishReason.STOP if stop_at <= cap_at else FinishReason.LENGTH)

    def test_the_hook_sees_each_emitted_token_once_and_in_order(self) -> None:
        seen: list[int] = []
        rows = Rows(favour(3), favour(EOS), favour(4), favour(5))
        accept(CHAIN, rows, sampler(), lambda token_id: seen.append(token_id) is not None)
        assert seen == [3, EOS]

    def test_nothing_follows_the_end(self) -> None:
        s = sampler(max_tokens=1)
        accept(TokenTree.root_only(2), Rows(favour(3)), s)
        with pytest.raises(RuntimeError, match="ended"):
            s.append(4)
        with pytest.raises(RuntimeError, match="ended"):
            accept(TokenTree.root_only(3), Rows(favour(3)), s)


class TestProcessorsPerPath:
    def test_min_tokens_masks_every_end_until_reached(self) -> None:
        s = sampler(min_tokens=2, stop_token_ids=(8,))
        wish = favour(EOS, 8, 3)
        out = accept(TokenTree.chain([2, 3, 3]), Rows(wish, wish, wish), s)
        assert (out.token_ids, out.finish_reason) == ((3, 3, EOS), FinishReason.STOP)

    def test_min_tokens_leaves_an_ignored_eos_alone(self) -> None:
        out = accept(TokenTree.root_only(2), Rows(favour(EOS)), sampler(min_tokens=2, ignore_eos=True))
        assert out.token_ids == (EOS,)

    def test_min_tokens_equal_to_max_tokens_ends_by_length(self) -> None:
        wish = favour(EOS, 3)
        out = accept(TokenTree.chain([2, 3]), Rows(wish, wish), sampler(min_tokens=2, max_tokens=2))
        assert (out.token_ids, out.finish_reason) == ((3, 3), FinishReason.LENGTH)

    def test_penalties_see_the_tokens_of_the_path(self) -> None:
        params = SamplingParams(presence_penalty=1.5)
        wish = favour(3, 4)  # 10 against 9: once 3 was emitted, 4 leads with 9 against 8.5; then 3 again
        out = accept(TokenTree.chain([2, 3, 4]), Rows(wish, wish, wish), sampler(params))
        assert out.token_ids == (3, 4, 3)

    def test_penalties_do_not_see_rejected_nodes(self) -> None:
        params = SamplingParams(presence_penalty=2.0)
        rows, s = Rows(favour(3, 4), favour(0), favour(0)), sampler(params)
        accept(TokenTree.chain([2, 5, 6]), rows, s)
        assert accept(TokenTree.root_only(3), Rows(favour(5, 6)), s).token_ids == (5,)

    def test_log_probs_one_per_emitted_token(self) -> None:
        out = accept(TREE, rows_for(n0=3, n1=6, n4=8), sampler(SamplingParams(top_log_probs=2)))
        assert [entry.token_id for entry in out.log_probs] == [3, 6, 8]
        assert all(entry.top[0] == (entry.token_id, entry.log_prob) for entry in out.log_probs)
        assert all(-0.01 < entry.log_prob < 0 for entry in out.log_probs)

    def test_no_log_probs_unless_asked(self) -> None:
        assert accept(TREE, rows_for(n0=3), sampler()).log_probs == ()


class TestTakeover:
    def test_generated_tokens_count_as_output(self) -> None:
        s = sampler(generated=(3, 4), max_tokens=3)
        assert (s.output_len, s.last_token_id) == (2, 4)
        assert accept(TokenTree.root_only(4), Rows(favour(5)), s).finish_reason == FinishReason.LENGTH

    def test_a_finished_generation_says_so(self) -> None:
        assert sampler(generated=(3, EOS)).finish_reason == FinishReason.STOP
        assert sampler(generated=(3, 4), max_tokens=2).finish_reason == FinishReason.LENGTH
        with pytest.raises(RuntimeError):
            sampler(generated=(3, EOS, 4))

    @pytest.mark.parametrize(
        ("field", "arguments"),
        [
            ("prompt", {"prompt": ()}),
            ("stopping.stop_token_ids", {"stop_token_ids": (VOCAB,)}),
            ("stopping.min_tokens", {"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))}),
            ("sampling.top_k", {"params": SamplingParams(top_k=VOCAB + 1)}),
            ("sampling.logit_bias", {"params": SamplingParams(logit_bias={VOCAB: 1.0})}),
        ],
    )
    def test_impossible_requests_are_refused(self, field: str, arguments: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgumentError) as raised:
            sampler(**arguments)
        assert raised.value.field == field
