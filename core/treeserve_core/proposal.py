"""A drafter's proposal for one sequence, and how it meets a prefix that has moved on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treeserve_core.errors import StaleBaseError
from treeserve_core.tree import TokenTree


@dataclass(frozen=True)
class DraftProposal:
    """A tree drawn for a committed length (prompt and output); its root is the last committed token.

    Attributes:
        base_committed_len: committed length the drafter saw.
        draft_us: time spent drafting, microseconds.
    """

    base_committed_len: int
    tree: TokenTree
    draft_us: int = 0

    def rebased(self, committed: Sequence[int]) -> TokenTree:
        """The tree under the present root: itself, or what is left of it along the tokens committed since.

        Args:
            committed: all committed tokens of the sequence, prompt included.

        Raises:
            StaleBaseError: if the base lies ahead of the sequence, the root differs, or the committed path is not in
                the tree.
        """
        base = self.base_committed_len
        if not 1 <= base <= len(committed):
            raise StaleBaseError(f"base {base} does not fit a committed length of {len(committed)}")
        if committed[base - 1] != self.tree.token_ids[0]:
            raise StaleBaseError(f"root {self.tree.token_ids[0]} is not the token committed at {base - 1}")
        tree = self.tree.rerooted(committed[base:])
        if tree is None:
            raise StaleBaseError(f"the tokens committed since {base} are not in the tree")
        return tree
