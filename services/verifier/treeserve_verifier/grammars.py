"""Compiles grammars beside the event loop and the steps, in a thread of its own."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

from treeserve_core.grammar import Grammar
from treeserve_text.grammar_thread import GrammarThread
from treeserve_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from treeserve_text.grammar import GrammarCompiler, GrammarMatcher


class Grammars:
    """Matchers for this verifier's sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = GrammarThread()

    async def prepare(self) -> None:
        """Load the library and the vocabulary, which stops every thread for 0.1 s and more: before anything runs."""
        await self._thread.run(lambda: self._compiler.prepare())

    async def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of the output.

        Raises:
            InvalidArgumentError: if the grammar has no meaning or allows no text.
            OverloadedError: if too many wait to be compiled.
        """
        return await self._thread.run(partial(self._matcher, grammar))

    def close(self) -> None:
        """Compile nothing more; waits for what is being compiled."""
        self._thread.close()

    def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        return self._compiler.matcher(grammar)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """The thread's alone."""
        from treeserve_text.grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer)
