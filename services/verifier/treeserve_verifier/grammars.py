"""Compiles grammars beside the event loop and the steps, in a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from treeserve_core.grammar import Grammar
from treeserve_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from treeserve_text.grammar import GrammarCompiler, GrammarMatcher


class Grammars:
    """Matchers for this verifier's sequences. The first one takes the time to load the library and the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of the output.

        Raises:
            InvalidArgumentError: if the grammar has no meaning or allows no text.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._matcher, grammar)

    def close(self) -> None:
        """Compile nothing more; waits for what is being compiled."""
        self._thread.shutdown(cancel_futures=True)

    def _matcher(self, grammar: Grammar) -> GrammarMatcher:
        return self._compiler.matcher(grammar)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """The thread's alone."""
        from treeserve_text.grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer)
