"""What an event costs a router that has 64 verifiers, however many requests wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from support.clock import Clock
from support.dispatching import BookedPool
from support.tickets import ticket

from treeserve_core.sampling import ServiceClass
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.queue import RequestQueue

VERIFIERS = 64
REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


class Bench:
    """A full cluster and a queue of all classes and several tenants."""

    def __init__(self, waiting: int) -> None:
        self.clock = Clock()
        self.pool = BookedPool(self.clock, VERIFIERS, max_sequences=32)
        self.dispatcher = Dispatcher(RequestQueue(100_000, 10**9, self.clock), self.pool, 10.0, self.clock)
        self.report_all(sequences=32)
        for i in range(waiting):
            service_class = (BATCH, STANDARD, INTERACTIVE)[i % 3]
            self.dispatcher.submit(ticket(service_class, tenant=f"t{i % 7}", ttft_ms=1e6))
        self.dispatcher.dispatch()

    def report_all(self, sequences: int) -> None:
        for verifier in self.pool.verifiers:
            verifier.report(sequences=sequences, step_s=0.01, prefill_tokens_per_s=3000)

    @property
    def submitted(self) -> int:
        return sum(len(verifier.submitted) for verifier in self.pool.verifiers)


def cost_s(event: Callable[[], object], times: int = 20) -> float:
    """CPU time of an event, the least of some."""
    taken: list[float] = []
    for _ in range(times):
        started = time.process_time()
        event()
        taken.append(time.process_time() - started)
    return min(taken)


def test_an_event_costs_the_same_however_many_wait() -> None:
    few, many = Bench(100), Bench(10_000)
    costs = {bench: cost_s(bench.dispatcher.dispatch) for bench in (few, many)}
    assert many.submitted == few.submitted == 0
    print(
        f"an event with 64 full verifiers: {costs[few] * 1e6:.0f} us, 100 waiting; {costs[many] * 1e6:.0f} us, 10,000"
    )
    assert costs[many] < 5 * costs[few] + 0.001


def placing_s(waiting: int) -> float:
    """CPU time for each ticket that is placed when places become free."""
    bench = Bench(waiting)
    bench.report_all(sequences=20)
    taken_s = cost_s(bench.dispatcher.dispatch, times=1)
    assert bench.submitted == VERIFIERS * 11  # one place of 32 is kept
    return taken_s / bench.submitted


def test_placing_does_not_cost_more_with_a_longer_queue() -> None:
    few, many = placing_s(1000), placing_s(10_000)
    print(f"for each ticket placed: {few * 1e6:.0f} us, 1,000 waiting; {many * 1e6:.0f} us, 10,000")
    assert many < 3 * few + 1e-4
