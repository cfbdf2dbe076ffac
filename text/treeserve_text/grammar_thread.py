"""The thread that compiles grammars: beside the event loop, with the stack that deep ones take, and a bounded queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from treeserve_core.errors import OverloadedError

MAX_PENDING = 64
# The compiler recurses: some 10 kB a level, and 64 KiB of text nest 8000 levels. Memory is taken as it is used.
_STACK_BYTES = 256 << 20
_RETRY_AFTER_S = 1.0

_T = TypeVar("_T")


class GrammarThread:
    """Runs one thing at a time. The thread starts with the first one."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._pending = 0
        self._has_thread = False

    async def run(self, work: Callable[[], _T]) -> _T:
        """What `work` returns, or raises.

        Raises:
            OverloadedError: if too much is waiting.
        """
        if self._pending >= MAX_PENDING:
            raise OverloadedError(f"{self._pending} grammars wait to be compiled", _RETRY_AFTER_S, "grammars")
        self._start()
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Run nothing more; waits for what runs."""
        self._executor.shutdown(cancel_futures=True)

    def _start(self) -> None:
        """Start the thread: how large its stack is, is the process's to say at that moment."""
        if self._has_thread:
            return
        usual = threading.stack_size(_STACK_BYTES)
        try:
            self._executor.submit(int)
        finally:
            threading.stack_size(usual)
        self._has_thread = True
