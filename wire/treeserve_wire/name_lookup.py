"""Looks a name up without ever waiting long: the resolver may hang for half a minute."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

_PATIENCE_S = 2.0
# More questions than this are never under way at a time.
_MAX_THREADS = 4


class NameLookup:
    """The IP addresses of one name.

    Questions are asked in threads of its own, because an event loop waits for its own ones before it closes.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._threads = threading.Semaphore(_MAX_THREADS)
        self._asked: list[asyncio.Future[list[str] | Exception]] = []  # the latest is the last

    async def ips(self) -> list[str]:
        """What the resolver says, or what it said to the latest question that it took too long for before.

        Raises:
            OSError: if it knows none, or has not answered yet.
        """
        if self._threads.acquire(blocking=False):
            self._asked.append(self._ask())
        if self._asked:
            await asyncio.wait(self._asked[-1:], timeout=_PATIENCE_S)
        answered = [i for i, question in enumerate(self._asked) if question.done()]
        if not answered:
            raise TimeoutError("the resolver does not answer")
        answer = self._asked[answered[-1]].result()
        del self._asked[: answered[-1] + 1]  # earlier questions are of no use any more
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self) -> asyncio.Future[list[str] | Exception]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str] | Exception] = loop.create_future()

        def resolve() -> None:
            found: list[str] | Exception
            try:
                infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                found = sorted({str(info[4][0]) for info in infos})
            except Exception as error:
                found = error
            self._threads.release()
            with contextlib.suppress(RuntimeError):  # the loop may have closed meanwhile
                loop.call_soon_threadsafe(answer.set_result, found)

        threading.Thread(target=resolve, name="name-lookup", daemon=True).start()
        return answer
