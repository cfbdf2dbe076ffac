"""Runs all systems round by round: one computes at a time, and each meets the same requests in every round."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.peer import Peer, PeerError, Reply
from benchmarks.peers.process import ProcessMemory, resume, suspend, tree_memory
from benchmarks.peers.report import Cell
from benchmarks.peers.tasks import Request

Group = tuple[Peer, ...]


@dataclass(frozen=True)
class Plan:
    """How much to run.

    Attributes:
        max_tokens: output tokens of each request.
        requests: for each batch size how many requests a system gets in a round.
        seed: of the order in which systems take turns.
    """

    rounds: int
    max_tokens: int
    requests: Mapping[int, int]
    seed: int = 0


class Rounds:
    """Runs a plan and gathers what came out.

    Peers of a group take their turn together: at batch size 1 each request goes to all their systems one after the
    other, so that what is compared closely is measured within seconds. A group in which a peer fails is skipped from
    then on.

    Args:
        groups: those that can run here.
        requests_of: the requests of a round at a batch size.
        report: told in one line each how far the run is.

    Attributes:
        cells: what the systems did.
        start_up_s: for each system, the seconds of each of its starts.
        memory: for each system its processes at the end of the turn in which they had taken most.
        skipped: systems that failed, with the reason.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[Group],
        requests_of: Callable[[int, int], Sequence[Request]],
        report: Callable[[str], None],
    ) -> None:
        self.cells: list[Cell] = []
        self.start_up_s: dict[str, list[float]] = {}
        self.memory: dict[str, list[ProcessMemory]] = {}
        self.skipped: dict[str, str] = {}
        self._plan = plan
        self._groups = list(groups)
        self._requests_of = requests_of
        self._report = report
        self._random = random.Random(plan.seed)
        self._up: set[Peer] = set()

    def run(self) -> None:
        """Run all rounds. All that was started is stopped again."""
        turns = [(r, batch) for r in range(self._plan.rounds) for batch in self._plan.requests]
        try:
            for group in self._groups:
                with self._skipping(group), contextlib.ExitStack() as stack:
                    for peer in group:
                        if peer.stays_up:
                            stack.enter_context(self._awake(peer))
            began = time.monotonic()
            for done, (round_index, batch) in enumerate(turns, start=1):
                for group in self._random.sample(self._groups, len(self._groups)):
                    with self._skipping(group):
                        self._take_turn(group, round_index, batch)
                spent = time.monotonic() - began
                left = spent / done * (len(turns) - done)
                self._report(f"round {round_index + 1}, batch {batch}: {spent:.0f} s, about {left:.0f} s left")
        finally:
            for peer in list(self._up):
                self._stop(peer)

    def _take_turn(self, group: Group, round_index: int, batch: int) -> None:
        members = [
            (peer, system)
            for peer in group
            for system in peer.systems
            if system not in self.skipped and peer.unsupported(system, batch) is None
        ]
        if not members:
            return
        requests = self._requests_of(round_index, batch)
        with contextlib.ExitStack() as stack:
            for peer in dict.fromkeys(peer for peer, _ in members):
                stack.enter_context(self._awake(peer))
                for system in (system for p, system in members if p is peer):
                    peer.generate(system, _warm_up(batch), batch)
            for system, replies in _interleaved(members, requests, batch, self._random).items():
                cell = Cell(round_index, system, batch, tuple(replies))
                self.cells.append(cell)
                self._report(f"  {system:<14} batch {batch:<3}{cell.tokens_per_s:8.1f} tokens/s")
            for peer in dict.fromkeys(peer for peer, _ in members):
                self._note_memory(peer)

    @contextlib.contextmanager
    def _awake(self, peer: Peer) -> Iterator[None]:
        """Have a peer run, and only as long as this lasts."""
        if peer in self._up:
            resume(peer.pid)
        else:
            self._start(peer)
        try:
            yield
        finally:
            if peer.stays_up:
                suspend(peer.pid)
            else:
                self._stop(peer)

    @contextlib.contextmanager
    def _skipping(self, group: Group) -> Iterator[None]:
        """Go on without a group in which a peer fails."""
        try:
            yield
        except PeerError as error:
            systems = [system for peer in group for system in peer.systems]
            self._report(f"  {', '.join(systems)} skipped: {error}")
            self.skipped.update(dict.fromkeys(systems, str(error)))
            self.cells = [cell for cell in self.cells if cell.system not in systems]
            for peer in group:
                self._stop(peer)

    def _start(self, peer: Peer) -> None:
        self._up.add(peer)  # before, so that one that half started is stopped
        seconds = peer.start()
        for system in peer.systems:
            self.start_up_s.setdefault(system, []).append(seconds)
        self._report(f"  {', '.join(peer.systems)}: first token after {seconds:.1f} s")

    def _stop(self, peer: Peer) -> None:
        if peer in self._up:
            self._up.remove(peer)
            peer.stop()

    def _note_memory(self, peer: Peer) -> None:
        found = tree_memory(peer.pid)
        for system in peer.systems:
            self.memory[system] = max(self.memory.get(system, []), found, key=_total_mb)


def _total_mb(processes: Sequence[ProcessMemory]) -> float:
    return sum(p.peak_rss_mb for p in processes)


def _interleaved(
    members: Sequence[tuple[Peer, str]], requests: Sequence[Request], batch: int, order: random.Random
) -> dict[str, list[Reply]]:
    """Run the requests on each system, in random order: one request at a time at batch size 1, else all.

    In a fixed cycle each system would always follow the same other one, and find caches and threads as that left them.
    """
    portions = [[request] for request in requests] if batch == 1 else [list(requests)]
    replies: dict[str, list[Reply]] = {system: [] for _, system in members}
    for portion in portions:
        for peer, system in order.sample(members, len(members)):
            replies[system] += peer.generate(system, portion, batch)
    return replies


def _warm_up(batch: int) -> list[Request]:
    """Short requests at full concurrency, of no task: what is set up at first use is set up before the clock runs."""
    ids = itertools.count(1000)
    return [Request("warm-up", tuple(itertools.islice(ids, 24)), 8) for _ in range(batch)]
