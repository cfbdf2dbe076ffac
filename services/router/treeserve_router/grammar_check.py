"""Compiles requests' grammars without a vocabulary, so that nearly every fault is found before a verifier is asked."""

from __future__ import annotations

import math
import time
from functools import partial

from treeserve_core.grammar import Grammar
from treeserve_router.local_table import LocalTable
from treeserve_text.grammar_thread import GrammarThread

_MOST_PASSED = 64


class GrammarCheck:
    """One grammar at a time, and those that passed last need no second time."""

    def __init__(self) -> None:
        self._thread = GrammarThread()
        self._passed: LocalTable[Grammar, bool] = LocalTable(math.inf, _MOST_PASSED, time.monotonic)

    async def check(self, grammar: Grammar) -> None:
        """Check one.

        Raises:
            InvalidArgumentError: naming its field, with the reason.
            OverloadedError: if too many wait to be checked.
        """
        if not self._passed.get(grammar):
            await self._thread.run(partial(_compile, grammar))
        self._passed.put(grammar, True)


def _compile(grammar: Grammar) -> None:
    from treeserve_text.grammar import check_grammar  # with its library, which few requests need

    check_grammar(grammar)
