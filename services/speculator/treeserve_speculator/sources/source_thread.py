"""The thread of a draft source that is not built in: makes every call to it, in order, and lets nothing out."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import structlog

from treeserve_core.errors import InvalidTreeError
from treeserve_core.tree import TokenTree
from treeserve_speculator.sequence import DraftSequence
from treeserve_speculator.sources.base import DraftSource
from treeserve_speculator.sources.refusal import RefusedTreeError, checked_tree

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Ask:
    """Trees asked for together. The worker fills them in one by one; `expired` tells it to leave the rest."""

    wanted: tuple[tuple[DraftSequence, int], ...]
    asked_at: float
    trees: list[TokenTree | None] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    expired: bool = False


class SourceThread:
    """One instance of a source and the only thread that calls it. Methods put calls in line and return at once."""

    def __init__(
        self, name: str, make: Callable[[], DraftSource], vocab_size: int, count: Callable[[str], None]
    ) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._count = count
        self._calls: queue.SimpleQueue[Callable[[DraftSource], None]] = queue.SimpleQueue()
        self._copies: dict[DraftSequence, DraftSequence] = {}
        self._given_up = False
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"source {name}", daemon=True)
        self._thread.start()

    def open(self, state: DraftSequence, copy: DraftSequence) -> None:
        """Introduce a sequence by its copy."""

        def call(source: DraftSource) -> None:
            self._copies[state] = copy
            self._guarded(source, state, partial(source.open, copy))

        self._calls.put(call)

    def commit(self, state: DraftSequence, tokens: tuple[int, ...], top_tokens: tuple[tuple[int, ...], ...]) -> None:
        """Advance a sequence."""

        def call(source: DraftSource) -> None:
            self._guarded(source, state, partial(self._commit, source, state, tokens, top_tokens))

        self._calls.put(call)

    def propose(self, ask: Ask) -> None:
        """Answer an ask."""

        def call(source: DraftSource) -> None:
            for state, budget in ask.wanted:
                if ask.expired:
                    break
                ask.trees.append(self._guarded(source, state, partial(self._propose, source, state, budget)))
            ask.done.set()

        self._calls.put(call)

    def close(self, state: DraftSequence) -> None:
        """Forget a sequence."""

        def call(source: DraftSource) -> None:
            if state in self._copies:
                self._drop(source, state)

        self._calls.put(call)

    def give_up(self) -> None:
        """Expect nothing more. The thread ends when its present call does; Python code is interrupted sooner."""
        self._given_up = True
        self._calls.put(lambda source: None)
        thread_id = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(SystemExit))

    def _run(self, make: Callable[[], DraftSource]) -> None:
        source = self._built(make)
        with suppress(SystemExit):  # given up between two calls
            while source is not None and not self._given_up:
                self._calls.get()(source)

    def _built(self, make: Callable[[], DraftSource]) -> DraftSource | None:
        try:
            return make()
        except BaseException as error:
            self._count("raised")
            _log.error("draft source cannot be built again", source=self._name, error=repr(error))
            return None  # nothing is answered: the next thread tries again

    def _commit(
        self,
        source: DraftSource,
        state: DraftSequence,
        tokens: tuple[int, ...],
        top_tokens: tuple[tuple[int, ...], ...],
    ) -> None:
        copy = self._copies[state]
        copy.tokens.extend(tokens)
        source.commit(copy, tokens, top_tokens)

    def _propose(self, source: DraftSource, state: DraftSequence, budget: int) -> TokenTree | None:
        copy = self._copies[state]
        root_token = copy.tokens[-1]
        answer = source.propose(copy, budget)
        return None if answer is None else checked_tree(answer, root_token, self._vocab_size).pruned(budget)

    def _guarded(
        self, source: DraftSource, state: DraftSequence, call: Callable[[], TokenTree | None]
    ) -> TokenTree | None:
        """The call's result. A sequence on which it fails is closed; not even an attempt to exit gets further."""
        if state not in self._copies or self._given_up:
            return None
        try:
            return call()
        except BaseException as error:
            if self._given_up:
                return None
            self._count(_reason(error))
            _log.warning("draft source failed on a sequence", source=self._name, error=repr(error))
        self._drop(source, state)
        return None

    def _drop(self, source: DraftSource, state: DraftSequence) -> None:
        try:
            source.close(self._copies.pop(state))
        except BaseException as error:
            _log.warning("draft source failed to close a sequence", source=self._name, error=repr(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, RefusedTreeError):
        return error.reason
    return "structure" if isinstance(error, InvalidTreeError) else "raised"
