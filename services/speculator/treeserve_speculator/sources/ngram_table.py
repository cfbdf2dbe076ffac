"""Drafts with tables of how the target itself goes on after a few tokens: a best-first tree, and no model call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from treeserve_core.acceptance import AcceptanceRule
from treeserve_core.draws import Draws
from treeserve_core.noise import nearly_gumbel
from treeserve_core.sampling import SamplingParams
from treeserve_core.tree import TokenTree
from treeserve_speculator.config import NGRAM_TABLE
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import SourceSettings
from treeserve_speculator.sources.growth import GrowthLimits, TreeGrowth, draw_children
from treeserve_speculator.sources.ngram_table_file import NgramTable, Successors, TableIdentity

_MAX_DEPTH = 8
_DRAWN_WIDTH = 4
_UNEXPANDED = -1
_EVEN_CHANCE = math.log(0.5)
# Hotter requests are drafted for as if they were this hot: there is little to guess, and exp must not overflow.
_MAX_TEMPERATURE = 8.0


class NgramTableSource:
    """Proposes the paths that are most probable by a table.

    The table knows the average text. Tokens that the sequence has shown before are likelier than it says, and so are
    those that the target's noise favours; how much is in the table's calibration, learned where the table was made.

    Args:
        max_depth: deepest node.
        min_probability: least path probability of a node.
    """

    name = NGRAM_TABLE
    wants_top_tokens = False

    def __init__(
        self,
        table: NgramTable,
        eos_token_ids: frozenset[int],
        *,
        max_depth: int = _MAX_DEPTH,
        min_probability: float = 0.01,
    ) -> None:
        self._table = table
        self._eos_token_ids = eos_token_ids
        self._max_depth = max_depth
        self._min_probability = min_probability

    def open(self, state: DraftSequence) -> None:
        """Note which tokens occur."""
        state.source_state[self.name] = set(state.tokens)

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Note which tokens occur."""
        state.source_state[self.name].update(new_tokens)

    def close(self, state: DraftSequence) -> None:
        """Drop the note."""
        state.source_state.pop(self.name, None)

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The `budget` most probable nodes; None where nothing is probable."""
        if state.acceptance is AcceptanceRule.MULTI_STEP and not state.sampling.is_greedy:
            tree = self._drawn(state, budget)
        else:
            tree = self._best(state, budget)
        return tree if len(tree) > 1 else None

    def _best(self, state: DraftSequence, budget: int) -> TokenTree:
        sampling = state.sampling
        if state.acceptance is AcceptanceRule.TYPICAL:  # probable tokens pass, whatever the noise would have drawn
            sampling = replace(sampling, temperature=0.0)
        seen: set[int] = state.source_state[self.name]
        # Other sources may agree with what alone would not pay.
        least = math.log(max(self._min_probability, state.prices.node / 2.0))
        context_len, root_position = self._table.max_order, len(state.tokens)
        token_ids, parents, depths, log_probs, path_log_probs = [state.tokens[-1]], [-1], [0], [0.0], [0.0]
        contexts = {0: tuple(state.tokens[: -context_len - 1 : -1])}  # tokens up to a node, the latest first
        children: dict[int, list[tuple[float, int]]] = {}
        # (-path log-probability, parent, rank): rank r + 1 enters when rank r leaves, so it stays small. A node enters
        # unexpanded, as if its best child had an even chance: most of the last ones need never be looked up.
        heap: list[tuple[float, int, int]] = [(0.0, 0, _UNEXPANDED)]
        while heap and len(token_ids) <= budget:
            _, parent, rank = heappop(heap)
            path_log_prob, depth = path_log_probs[parent], depths[parent]
            if rank == _UNEXPANDED:
                enough = least - path_log_prob
                children[parent] = self._children(contexts[parent], seen, sampling, root_position + depth, enough)
            else:
                log_prob, token_id = children[parent][rank]
                node = len(token_ids)
                token_ids.append(token_id)
                parents.append(parent)
                depths.append(depth + 1)
                log_probs.append(log_prob)
                path_log_probs.append(path_log_prob + log_prob)
                bound = path_log_prob + log_prob + _EVEN_CHANCE
                if bound >= least and depth + 1 < self._max_depth and token_id not in self._eos_token_ids:
                    contexts[node] = (token_id, *contexts[parent][: context_len - 1])
                    heappush(heap, (-bound, node, _UNEXPANDED))
            if rank + 1 < len(children[parent]):
                heappush(heap, (-path_log_prob - children[parent][rank + 1][0], parent, rank + 1))
        return TokenTree.sound(tuple(token_ids), tuple(parents), tuple(log_probs))

    def _children(
        self, latest_first: tuple[int, ...], seen: set[int], sampling: SamplingParams, position: int, least: float
    ) -> list[tuple[float, int]]:
        """What may follow a context with a log-probability of at least `least`: that and token, the best first."""
        found = self._table.successors(latest_first)
        weights, rest = self._weights(found, seen), found.rest
        if not sampling.is_greedy:
            calibration, temperature = self._table.calibration, min(sampling.temperature, _MAX_TEMPERATURE)
            power = calibration.noise * temperature
            noise = nearly_gumbel(sampling.seed, position, found.token_ids)
            weights = [weight * math.exp(power * g) for weight, g in zip(weights, noise, strict=True)]
            rest *= math.exp(calibration.rest_noise * temperature)
        total = rest + sum(weights)
        enough = total * math.exp(least)
        pairs = zip(weights, found.token_ids, strict=True)
        ranked = sorted([(-weight, token_id) for weight, token_id in pairs if weight >= enough])
        return [(math.log(-negative / total), token_id) for negative, token_id in ranked]

    def _weights(self, found: Successors, seen: set[int]) -> list[float]:
        weights, again = list(found.weights), self._table.calibration.again
        for token_id in seen.intersection(found.token_ids):
            weights[found.token_ids.index(token_id)] *= again
        return weights

    def _drawn(self, state: DraftSequence, budget: int) -> TokenTree:
        """A tree of independent draws, as the multi-step rule wants them."""
        seen: set[int] = state.source_state[self.name]
        limits = GrowthLimits(budget, self._max_depth, _DRAWN_WIDTH, self._min_probability)
        growth = TreeGrowth(state.tokens[-1], limits, self._eos_token_ids)
        contexts = {0: tuple(state.tokens[: -self._table.max_order - 1 : -1])}
        while level := growth.next_level():
            for node in level:
                if node > 0:
                    above = contexts[growth.parents[node]][: self._table.max_order - 1]
                    contexts[node] = (growth.token_ids[node], *above)
                found = self._table.successors(contexts[node])
                if found.token_ids:
                    count = growth.num_draws(node, _DRAWN_WIDTH)
                    growth.expand_by(node, self._draws(found, seen, state, growth.depths[node], count))
        return growth.tree()

    def _draws(self, found: Successors, seen: set[int], state: DraftSequence, depth: int, count: int) -> Draws:
        ids = np.array(found.token_ids)
        order = np.argsort(ids)
        logits = np.log(np.array(self._weights(found, seen)))[order].astype(np.float32)
        return draw_children(logits, state.sampling, len(state.tokens) + depth, count, ids[order])


def open_table(settings: SourceSettings) -> NgramTable:
    """The target's table.

    Raises:
        InvalidArgumentError: if there is none that is whole and the target's.
    """
    identity = TableIdentity(settings.tokenizer_hash, settings.vocab_size)
    return NgramTable.open(settings.trained_file(NGRAM_TABLE), identity, settings.config.cache_dir)


def build(settings: SourceSettings) -> NgramTableSource:
    """The source with the target's table. Raises as `open_table`."""
    max_depth = min(_MAX_DEPTH, settings.config.max_depth)
    return NgramTableSource(open_table(settings), settings.eos_token_ids, max_depth=max_depth)
