"""next_token by hand-worked cases and against brute force; log-probabilities; bad logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeserve_core.noise import gumbel
from treeserve_core.sampling import SamplingParams
from treeserve_engine import noisy_argmax as module
from treeserve_engine.next_token import NonFiniteLogitsError, next_token, position_log_probs
from treeserve_engine.processors import TokenContext, processed_logits

EMPTY = TokenContext()
FLOAT32_MAX = np.finfo(np.float32).max


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def log_row(*probabilities: float) -> npt.NDArray[np.float32]:
    return np.log(np.array(probabilities)).astype(np.float32)


def reachable(logits: npt.NDArray[np.float32], draws: int = 300, **params: Any) -> set[int]:
    """Ids drawn at many positions."""
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 11, **params})
    return {next_token(logits, sampling, EMPTY, position) for position in range(draws)}


class TestGreedy:
    def test_largest_logit_and_lowest_id_on_ties(self) -> None:
        assert next_token(row(1, 3, 2), SamplingParams(), EMPTY, 0) == 1
        assert next_token(row(1, 3, 3, 3), SamplingParams(), EMPTY, 0) == 1

    def test_seed_position_and_filters_do_not_matter(self) -> None:
        params = SamplingParams(top_k=1, top_p=0.1, min_p=0.9, seed=5)
        assert next_token(row(1, 3, 3), params, EMPTY, 17) == 1

    def test_blocked_ids_are_never_chosen(self) -> None:
        assert next_token(row(1, 3, 2), SamplingParams(), EMPTY, 0, blocked_ids=(1,)) == 2
        assert next_token(row(1, 3, 2), SamplingParams(), EMPTY, 0, blocked_ids=(1, 2)) == 0

    def test_logits_stay_unchanged(self) -> None:
        logits = row(1, 3, 2)
        params = SamplingParams(logit_bias={0: 5.0}, repetition_penalty=2.0)
        next_token(logits, params, TokenContext([1]), 0, blocked_ids=(2,))
        assert logits.tolist() == [1, 3, 2]

    def test_read_only_logits_are_fine(self) -> None:
        logits = row(1, 3, 2)
        logits.flags.writeable = False
        assert next_token(logits, SamplingParams(logit_bias={0: 5.0}), EMPTY, 0) == 0


class TestProcessors:
    def test_repetition_covers_prompt_and_output_once_each(self) -> None:
        context = TokenContext([0, 0, 2], [1, 1, 2])
        out = processed_logits(row(4, -4, 3, 1), SamplingParams(repetition_penalty=2.0), context)
        assert out.tolist() == [2, -8, 1.5, 1]

    def test_presence_and_frequency_cover_output_only(self) -> None:
        context = TokenContext([0], [1, 1, 1, 2])
        params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
        assert processed_logits(row(1, 1, 1, 1), params, context).tolist() == [1, -0.25, 0.25, 1]

    def test_order_is_repetition_then_subtractive_then_bias_then_block(self) -> None:
        context = TokenContext([], [0])
        params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 10.0, 1: 100.0})
        assert processed_logits(row(4, 0), params, context, blocked_ids=(1,)).tolist() == [11, -np.inf]

    def test_nothing_to_do_returns_the_same_array(self) -> None:
        logits = row(1, 2)
        assert processed_logits(logits, SamplingParams(temperature=1.0), TokenContext([0], [1])) is logits

    def test_extreme_penalties_saturate(self) -> None:
        with np.errstate(over="raise", invalid="raise"):
            params = SamplingParams(repetition_penalty=1e-300, logit_bias={1: 100.0})
            out = processed_logits(row(1e30, FLOAT32_MAX, -1e30), params, TokenContext([0, 1, 2]))
        assert out.tolist() == [FLOAT32_MAX, FLOAT32_MAX, 0.0]
        assert next_token(row(1e30, 1e30, -1e30), params, TokenContext([0, 1, 2]), 0) == 0

    def test_context_grows_token_by_token(self) -> None:
        grown = TokenContext([3, 1, 3])
        for token_id in (1, 7, 7):
            grown.push(token_id)
        ids, counts = grown.counts()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {3: 0, 1: 1, 7: 2}
        whole_ids, whole_counts = TokenContext([3, 1, 3], [1, 7, 7]).counts()
        assert (whole_ids.tolist(), whole_counts.tolist()) == (ids.tolist(), counts.tolist())


class TestFilters:
    def test_top_k(self) -> None:
        assert reachable(row(0, 0.3, 0.2, 0.1), top_k=2) == {1, 2}

    def test_top_k_border_ties_keep_the_lowest_ids(self) -> None:
        assert reachable(row(1, 2, 1, 1, 2, 1), top_k=4) == {0, 1, 2, 4}
        assert reachable(row(0, 0, 0), top_k=1) == {0}

    def test_top_k_of_the_whole_vocabulary_is_no_filter(self) -> None:
        assert reachable(row(0, 0, 0), top_k=3) == {0, 1, 2}

    def test_top_p_keeps_the_smallest_set_that_reaches_it(self) -> None:
        logits = log_row(0.1, 0.4, 0.2, 0.3)
        assert reachable(logits, top_p=0.35) == {1}
        assert reachable(logits, top_p=0.6) == {1, 3}
        assert reachable(logits, top_p=0.8) == {1, 2, 3}
        assert reachable(logits, top_p=0.95) == {0, 1, 2, 3}

    def test_top_p_reached_exactly_needs_no_further_token(self) -> None:
        assert reachable(row(0, 0, 0, 0), top_p=0.5) == {0, 1}

    def test_tiny_top_p_keeps_the_best(self) -> None:
        assert reachable(row(0, 0, 0.1), top_p=1e-12) == {2}

    def test_top_p_just_below_one(self) -> None:
        assert reachable(row(0, 0, 0), top_p=float(np.nextafter(1.0, 0.0))) == {0, 1, 2}

    def test_top_p_works_on_what_top_k_left(self) -> None:
        # Of the two left, the first holds 0.4 / 0.7 = 0.57: enough for 0.5, though 0.4 alone is not.
        assert reachable(log_row(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == {0}

    def test_temperature_comes_before_top_p(self) -> None:
        logits = log_row(0.6, 0.2, 0.2)
        assert reachable(logits, top_p=0.55) == {0}
        assert reachable(logits, top_p=0.55, temperature=3.0) == {0, 1}

    def test_min_p(self) -> None:
        logits = log_row(0.5, 0.3, 0.15, 0.05)
        assert reachable(logits, min_p=0.25) == {0, 1, 2}
        assert reachable(logits, min_p=0.5) == {0, 1}
        assert reachable(row(1, 1, 0.999), min_p=1.0) == {0, 1}

    def test_min_p_intersects_the_other_filters(self) -> None:
        logits = log_row(0.4, 0.3, 0.2, 0.1)
        assert reachable(logits, min_p=0.4, top_k=2) == {0, 1}
        assert reachable(logits, min_p=0.7, top_k=3) == {0, 1}

    def test_blocked_ids_leave_the_filters_before_they_count(self) -> None:
        params = SamplingParams(temperature=1.0, top_k=2)
        drawn = {next_token(row(9, 1, 1, 0), params, EMPTY, p, blocked_ids=(0,)) for p in range(200)}
        assert drawn == {1, 2}

    def test_more_kept_than_unblocked(self) -> None:
        for params in (
            SamplingParams(temperature=1.0, top_k=3),
            SamplingParams(temperature=1.0, top_p=0.999),
            SamplingParams(temperature=1.0, min_p=1e-9),
        ):
            drawn = {next_token(row(1, 1, 0, 0), params, EMPTY, p, blocked_ids=(0, 2, 3)) for p in range(50)}
            assert drawn == {1}


@pytest.fixture(scope="class")
def in_numpy() -> Iterator[None]:
    """As if the native library were not built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "native_sampling", lambda: None)
        yield


@pytest.mark.usefixtures("in_numpy")
class TestNoise:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
    def test_pruning_equals_the_full_noise(self, temperature: float) -> None:
        rng = np.random.default_rng(3)
        vocab = 3 * 16384 + 77  # several blocks, the last one short
        for position in range(15):
            logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
            params = SamplingParams(temperature=temperature, seed=2**63 + position)
            shifted = (logits - np.float64(logits.max())) / temperature
            expected = int(np.argmax(shifted + gumbel(params.seed, position, np.arange(vocab))))
            assert next_token(logits, params, EMPTY, position) == expected

    @given(
        st.lists(st.sampled_from([-30.0, -1.0, 0.0, 0.5, 0.50001, 8.0]), min_size=1, max_size=40),
        st.sampled_from([0.01, 0.5, 1.0, 30.0]),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**20),
    )
    def test_pruning_equals_the_full_noise_on_odd_rows(
        self, values: list[float], temperature: float, seed: int, position: int
    ) -> None:
        logits = row(*values)
        shifted = (logits - np.float64(logits.max())) / temperature
        expected = int(np.argmax(shifted + gumbel(seed, position, np.arange(len(values)))))
        params = SamplingParams(temperature=temperature, seed=seed)
        assert next_token(logits, params, EMPTY, position) == expected

    def test_equal_scores_go_to_the_lowest_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def one_counter(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return np.full(len(ids), 2**52 + 1)

        monkeypatch.setattr(module, "uniform_counters", one_counter)
        monkeypatch.setattr(module, "gumbel", lambda seed, position, ids: np.zeros(len(ids)))
        assert next_token(row(0, 1, 1, 1), SamplingParams(temperature=1.0), EMPTY, 0) == 1
        assert next_token(row(0, 1, 1, 1), SamplingParams(temperature=1.0, top_k=2), EMPTY, 0) == 1

    @pytest.mark.parametrize("counter", [1, 2**53 - 1])
    def test_a_uniform_draw_at_either_end(self, counter: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The best token with the least noise there is, or an unlikely one with the most."""
        unlikely = 1 if counter > 1 else 0

        def counters(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return np.where(ids == unlikely, counter, 2**52 + 1)

        def noise(seed: int, position: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            return -np.log(-np.log(counters(seed, position, ids) * 2.0**-53))

        monkeypatch.setattr(module, "uniform_counters", counters)
        monkeypatch.setattr(module, "gumbel", noise)
        # Noise is 36.74 at most, -3.60 at least, 0.37 in the middle.
        gap = 36.3 if counter > 1 else 3.9
        params = SamplingParams(temperature=1.0)
        assert next_token(row(gap, 0), params, EMPTY, 0) == 1
        assert next_token(row(gap + 0.2, 0), params, EMPTY, 0) == 0

    def test_padded_tail_changes_nothing_once_cut(self) -> None:
        padded = row(1, 2, 3, 99, 99)
        params = SamplingParams(temperature=1.0)
        for position in range(30):
            assert next_token(padded[:3], params, EMPTY, position) == next_token(row(1, 2, 3), params, EMPTY, position)

    @pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-6])
    def test_tiny_temperatures_are_greedy_up_to_ties(self, temperature: float) -> None:
        with np.errstate(invalid="raise", divide="raise"):
            assert reachable(row(3, 5, 5, -FLOAT32_MAX), temperature=temperature) == {1, 2}
            assert reachable(row(3, 5, 5, -5), temperature=temperature, top_p=0.9, min_p=0.1, top_k=3) == {1, 2}

    def test_extreme_logits_are_safe(self) -> None:
        with np.errstate(invalid="raise", divide="raise"):
            assert reachable(row(FLOAT32_MAX, -FLOAT32_MAX, 0), top_p=0.9, min_p=1e-9) == {0}
            assert reachable(row(-FLOAT32_MAX, -FLOAT32_MAX), temperature=100.0, top_p=0.9999) == {0, 1}

    def test_a_vocabulary_of_one(self) -> None:
        assert reachable(row(-5.0), top_p=0.5, min_p=0.5, top_k=1, draws=3) == {0}


class TestBadLogits:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_non_finite_logits_are_refused(self, bad: float, temperature: float) -> None:
        with pytest.raises(NonFiniteLogitsError, match="1 logits are not finite; id 1"):
            next_token(row(0, bad, 1), SamplingParams(temperature=temperature), EMPTY, 0)


class TestLogProbs:
    def test_equal_a_plain_log_softmax(self) -> None:
        logits = log_row(0.5, 0.25, 0.125, 0.125)
        out = position_log_probs(logits, SamplingParams(top_log_probs=3), EMPTY, 2)
        assert out.token_id == 2
        assert out.log_prob == pytest.approx(np.log(0.125), abs=1e-6)
        assert [token_id for token_id, _ in out.top] == [0, 1, 2]  # the tie at the border goes to the lowest id
        assert [log_prob for _, log_prob in out.top] == pytest.approx(np.log([0.5, 0.25, 0.125]), abs=1e-6)

    def test_neither_temperature_nor_filters_change_them(self) -> None:
        logits = log_row(0.5, 0.25, 0.125, 0.125)
        plain = position_log_probs(logits, SamplingParams(top_log_probs=4), EMPTY, 0)
        sampled = SamplingParams(temperature=0.3, top_k=1, top_p=0.2, min_p=0.9, top_log_probs=4)
        assert position_log_probs(logits, sampled, EMPTY, 0) == plain

    def test_penalties_bias_and_blocked_ids_do(self) -> None:
        params = SamplingParams(logit_bias={1: 1.0}, presence_penalty=1.0, top_log_probs=4)
        out = position_log_probs(row(1, 0, 5, 0), params, TokenContext([], [0]), 1, blocked_ids=(2,))
        total = np.exp(0.0) + np.exp(1.0) + np.exp(0.0)
        assert out.log_prob == pytest.approx(1.0 - np.log(total))
        assert [token_id for token_id, _ in out.top] == [1, 0, 3]

    def test_zero_top_means_the_chosen_one_only(self) -> None:
        assert position_log_probs(row(1, 0), SamplingParams(top_log_probs=0), EMPTY, 0).top == ()

    def test_more_top_than_vocabulary(self) -> None:
        assert len(position_log_probs(row(1, 0), SamplingParams(top_log_probs=20), EMPTY, 0).top) == 2
