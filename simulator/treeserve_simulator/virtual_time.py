"""An asyncio event loop whose clock jumps to whatever happens next: coroutines run unchanged, and waiting is free."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class StalledError(RuntimeError):
    """Everything waits for something that nothing will bring about."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s. Time passes only while every task waits; what is meant for a thread is done at once instead."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def run_in_executor(  # type: ignore[override]  # the parent's comes with a type variable tuple
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """The result of a call that takes no time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


class _Skipping(selectors.SelectSelector):
    """Where the loop would sleep until its next timer, the time until then is skipped."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """No file is ever ready. Raises StalledError if there is no timer either."""
        if timeout is None:
            raise StalledError("nothing is left that could happen, and the simulation has not ended")
        self._loop.skip(max(0.0, timeout))
        return []


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh virtual clock. Raises what it raises, and StalledError if it can never end."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
