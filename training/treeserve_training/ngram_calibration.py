"""Calibrates an n-gram table: how surely the target follows it, learned from outputs that the table has not seen.

The chance that the target chooses a token is a softmax whose scores are linear in what is known of the token
(`Calibration` has the formula), so its five coefficients are those of a multinomial logit: the likelihood is concave,
and a few of Newton's steps reach its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from treeserve_core.noise import nearly_gumbel
from treeserve_speculator.sources.ngram_table_file import Calibration, NgramTable
from treeserve_training.records import Sample

_MOST_POSITIONS = 20_000
_STEPS = 20
_CLOSE = 1e-5
# Where little or nothing is held out, the coefficients stay near these, found on SmolLM2-135M-Instruct: of log q, of
# a token seen before, of the noise; the rest's constant, and what a degree of temperature adds to it.
_USUAL = np.array([0.75, 1.8, 0.65, 2.0, 1.3])
_TRUST = 1.0

FloatArray = npt.NDArray[np.float64]


def calibrate(table: NgramTable, samples: Iterable[Sample]) -> Calibration:
    """The calibration under which the samples' tokens are most probable.

    Args:
        table: with the neutral calibration: its weights are probabilities.
        samples: held out; the first 20,000 output tokens count.
    """
    positions = list(islice(chain.from_iterable(_positions(table, sample) for sample in samples), _MOST_POSITIONS))
    coefficients = _most_likely(*_padded(positions)) if positions else _USUAL
    exponent, again, noise, rest, rest_noise = coefficients.tolist()
    return Calibration(exponent, math.exp(again), noise, math.exp(rest), rest_noise)


def _positions(table: NgramTable, sample: Sample) -> Iterator[tuple[FloatArray, int]]:
    """For each output token what is known of the candidates, float64[candidates, 5], and which one it was.

    Candidate 0 stands for all tokens that the context does not name.
    """
    tokens, seen = list(sample.prompt_ids), set(sample.prompt_ids)
    for i, token_id in enumerate(sample.output_ids):
        found = table.successors(tuple(tokens[: -table.max_order - 1 : -1]))
        known = np.zeros((1 + len(found.token_ids), len(_USUAL)))
        known[0, [0, 3, 4]] = math.log(found.rest), 1.0, sample.temperature
        known[1:, 0] = np.log(found.weights)
        known[1:, 1] = [candidate in seen for candidate in found.token_ids]
        if sample.temperature > 0:
            known[1:, 2] = nearly_gumbel(sample.seed, len(tokens), found.token_ids)
            known[1:, 2] *= sample.temperature
        chosen = _chosen(sample, i, table.identity.vocab_size)
        yield known, found.token_ids.index(chosen) + 1 if chosen in found.token_ids else 0
        tokens.append(token_id)
        seen.add(token_id)


def _chosen(sample: Sample, i: int, vocab_size: int) -> int:
    """The token that the target would choose in the place of output token `i` with the noise that drafters know.

    How the recorded token was drawn is the generator's business. All tokens beyond the recorded ones count as one, with
    an id that no list holds.
    """
    if sample.temperature == 0:
        return sample.output_ids[i]
    log_probs = sample.top_log_probs[i].astype(np.float64)
    beyond = math.log(max(1e-6, 1.0 - np.exp(log_probs).sum()))
    candidates = [*sample.top_ids[i].tolist(), vocab_size]
    noise = nearly_gumbel(sample.seed, len(sample.prompt_ids) + i, candidates)
    return int(candidates[np.argmax(np.append(log_probs, beyond) / sample.temperature + noise)])


def _padded(
    positions: Sequence[tuple[FloatArray, int]],
) -> tuple[FloatArray, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """float64[positions, candidates, 5], which of them are real, and the chosen one of each position."""
    width = max(len(known) for known, _ in positions)
    features, real = np.zeros((len(positions), width, len(_USUAL))), np.zeros((len(positions), width), bool)
    for i, (known, _) in enumerate(positions):
        features[i, : len(known)] = known
        real[i, : len(known)] = True
    return features, real, np.array([chosen for _, chosen in positions])


def _most_likely(features: FloatArray, real: npt.NDArray[np.bool_], chosen: npt.NDArray[np.int64]) -> FloatArray:
    """Newton's method from, and with a weak pull towards, the usual coefficients."""
    observed = features[np.arange(len(chosen)), chosen].sum(0)

    def weigh(coefficients: FloatArray) -> tuple[float, FloatArray]:
        """The penalised log-likelihood, and each candidate's probability."""
        scores = np.where(real, features @ coefficients, -np.inf)
        highest = scores.max(1, keepdims=True)
        weights = np.exp(scores - highest)
        sums = weights.sum(1, keepdims=True)
        log_likelihood = observed @ coefficients - (highest + np.log(sums)).sum()
        return float(log_likelihood - _TRUST / 2 * np.square(coefficients - _USUAL).sum()), weights / sums

    coefficients = _USUAL.copy()
    value, weights = weigh(coefficients)
    for _ in range(_STEPS):
        means = np.einsum("nk,nkf->nf", weights, features)
        gradient = observed - means.sum(0) - _TRUST * (coefficients - _USUAL)
        curvature = np.einsum("nk,nkf,nkg->fg", weights, features, features, optimize=True) - means.T @ means
        step = np.linalg.solve(curvature + _TRUST * np.eye(len(_USUAL)), gradient)
        while (further := weigh(coefficients + step))[0] < value and np.abs(step).max() > _CLOSE:
            step /= 2
        if np.abs(step).max() <= _CLOSE:
            break
        coefficients += step
        value, weights = further
    return coefficients
