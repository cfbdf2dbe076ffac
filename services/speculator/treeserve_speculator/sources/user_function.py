"""A plain function as a draft source: token ids in, candidate continuations out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.refusal import RefusedTreeError, plain_ids, with_guesses

# f(token_ids, budget): candidate continuations, best first, of at most `budget` tokens together; or a tree; or None.
UserFunction: TypeAlias = Callable[[list[int], int], Iterable[Iterable[int]] | TokenTree | None]

_MAX_CANDIDATES = 1024


class FunctionSource:
    """Asks a function for every tree and keeps nothing.

    Args:
        function: called with a copy of all committed tokens and the budget.
    """

    wants_top_tokens = False

    def __init__(self, name: str, function: UserFunction, vocab_size: int) -> None:
        self.name = name
        self._function = function
        self._vocab_size = vocab_size

    def open(self, state: DraftSequence) -> None:
        """Nothing to keep."""

    def commit(self, state: DraftSequence, new_tokens: Sequence[int], top_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing to learn."""

    def propose(self, state: DraftSequence, budget: int) -> TokenTree | None:
        """The function's candidates as a tree.

        Raises:
            RefusedTreeError: if they are no lists of token ids.
        """
        answer = self._function(list(state.tokens), budget)
        if answer is None or (isinstance(answer, TokenTree) and answer.log_probs is not None):
            return answer
        if isinstance(answer, TokenTree):
            return with_guesses(answer.token_ids, answer.parents)
        if isinstance(answer, str | bytes) or not isinstance(answer, Iterable):
            raise RefusedTreeError("type", f"a {type(answer).__name__} is no list of candidates")
        return self._joined(state.tokens[-1], answer, budget)

    def close(self, state: DraftSequence) -> None:
        """Nothing was kept."""

    def _joined(self, root_token: int, candidates: Iterable[Iterable[int]], budget: int) -> TokenTree | None:
        """The candidates' common tree, the first ones first; none beyond the budget is looked at."""
        token_ids, parents = [root_token], [-1]
        nodes: dict[tuple[int, int], int] = {}
        for candidate in islice(candidates, _MAX_CANDIDATES):
            if isinstance(candidate, str | bytes) or not isinstance(candidate, Iterable):
                raise RefusedTreeError("type", f"a {type(candidate).__name__} is no list of token ids")
            node = 0
            for token_id in plain_ids(islice(candidate, budget), self._vocab_size):
                parent = node
                node = nodes.setdefault((parent, token_id), len(token_ids))
                if node == len(token_ids):
                    token_ids.append(token_id)
                    parents.append(parent)
                if len(token_ids) > budget:
                    return with_guesses(token_ids, parents)
        return with_guesses(token_ids, parents) if len(token_ids) > 1 else None
