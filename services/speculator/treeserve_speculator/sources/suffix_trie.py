"""A depth-bounded trie of all substrings with counts: how often each context was followed by each token."""

from __future__ import annotations

from collections.abc import Sequence


class TrieNode:
    """One substring: how often it occurred and what followed."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, TrieNode] | None = None  # most nodes are leaves: no dict until one is needed

    def followers(self) -> list[tuple[int, int, TrieNode]]:
        """Each token that followed, how often, and the substring with it."""
        if self.children is None:
            return []
        return [(token_id, child.count, child) for token_id, child in self.children.items()]

    def child(self, token_id: int) -> TrieNode | None:
        """The substring one token longer, or None if it never occurred."""
        return None if self.children is None else self.children.get(token_id)


class SuffixTrie:
    """Counts of all substrings of at most `depth` tokens of the sequences added to it."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.size = 0
        self.root = TrieNode()

    def extend(self, suffixes: list[TrieNode], token_id: int) -> list[TrieNode]:
        """Append a token to a growing sequence.

        Args:
            suffixes: nodes of the sequence's suffixes of length 0, 1, ... before the token; ``[trie.root]`` at first.

        Returns:
            The same list after the token, to be passed to the next call.
        """
        longer = [self.root]
        for node in suffixes:
            if node.children is None:
                node.children = {}
            child = node.children.get(token_id)
            if child is None:
                child = node.children[token_id] = TrieNode()
                self.size += 1
            child.count += 1
            longer.append(child)
        return longer[: self.depth]

    def add(self, tokens: Sequence[int]) -> None:
        """Count every substring of a whole sequence."""
        suffixes = [self.root]
        for token_id in tokens:
            suffixes = self.extend(suffixes, token_id)

    def remove(self, tokens: Sequence[int]) -> None:
        """Undo one `add` of the same tokens."""
        for start in range(len(tokens)):
            node = self.root
            end = min(start + self.depth, len(tokens))
            for position in range(start, end):
                assert node.children is not None, "removed tokens that were never added"
                child = node.children[tokens[position]]
                child.count -= 1
                if child.count == 0:  # this occurrence was the only one, so what hangs below is its own chain
                    del node.children[tokens[position]]
                    self.size -= end - position
                    break
                node = child

    def find(self, tokens: Sequence[int]) -> TrieNode | None:
        """The node of a substring, or None if it never occurred."""
        node: TrieNode | None = self.root
        for token_id in tokens:
            if node is None:
                return None
            node = node.child(token_id)
        return node
