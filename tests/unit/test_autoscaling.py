"""Hints for autoscalers: sums of what verifiers did, what they could not take, and silence where nothing is known."""

from __future__ import annotations

import pytest
from support.clock import Clock

from treeserve_core.errors import UnavailableError
from treeserve_router.autoscaling import Autoscaler, Demand, Role
from treeserve_router.placement import VerifierState


class Cluster:
    """Verifiers that do what a test says, looked at each second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.autoscaler = Autoscaler(100, self.clock)
        self.offered = self.begun = self.waiting = 0
        self.work: dict[str, float | None] = {}
        self.drafting = 0.0
        self.speculators = 1
        self.sequences = 0

    def run(self, seconds: int, offered: int = 0, begun: int = 0, **work: float) -> None:
        """Each second verifiers do so much work."""
        for _ in range(seconds):
            self.clock.now += 1.0
            self.offered += offered
            self.begun += begun
            for name, done in work.items():
                self.work[name] = (self.work.get(name) or 0.0) + done
            self.look()

    def look(self) -> None:
        self.autoscaler.observe(
            [self._state(name, work) for name, work in self.work.items()], self.offered, self.begun, self.waiting
        )

    def wanted(self, role: Role = Role.VERIFIER) -> float:
        return self.autoscaler.wanted(role)

    def _state(self, name: str, work: float | None) -> VerifierState:
        return VerifierState(
            name,
            name,
            4096,
            32,
            sequences=self.sequences,
            speculators=self.speculators,
            work_s=work,
            drafting_s=self.drafting,
        )


def test_the_work_of_all_verifiers_adds_up() -> None:
    cluster = Cluster()
    cluster.run(20, a=0.5, b=0.75, c=1.25)
    assert cluster.wanted() == pytest.approx(2.5)


def test_what_they_did_before_they_were_seen_does_not_count() -> None:
    cluster = Cluster()
    cluster.work = {"a": 5000.0}
    cluster.run(20, a=0.5)
    assert cluster.wanted() == pytest.approx(0.5, rel=0.05)


def test_a_verifier_that_starts_anew_counts_on() -> None:
    cluster = Cluster()
    cluster.run(15, a=0.5)
    cluster.work["a"] = 0.0
    cluster.run(15, a=0.5)
    assert cluster.wanted() == pytest.approx(0.5, rel=0.05)


def test_the_work_of_a_verifier_that_left_is_not_forgotten_at_once() -> None:
    cluster = Cluster()
    cluster.run(30, a=1.0, b=1.0)
    del cluster.work["b"]
    cluster.run(15, a=1.0)
    assert cluster.wanted() == pytest.approx(1.5, rel=0.05)


def test_half_a_minute_counts_and_no_more() -> None:
    cluster = Cluster()
    cluster.run(60, a=4.0)
    cluster.run(30, a=1.0)
    assert cluster.wanted() == pytest.approx(1.0)


def test_a_burst_between_two_questions_is_seen_by_the_second() -> None:
    cluster = Cluster()
    cluster.run(30, a=0.0)
    cluster.run(10, a=3.0)
    cluster.run(19, a=0.0)
    assert cluster.wanted() == pytest.approx(1.0, rel=0.05)


def test_idle_verifiers_are_wanted_no_more() -> None:
    cluster = Cluster()
    cluster.run(20, a=0.0)
    assert cluster.wanted() == 0.0


@pytest.mark.parametrize(("offered", "waiting"), [(1, 0), (0, 1)])
def test_verifiers_that_do_nothing_while_requests_come_are_not_idle(offered: int, waiting: int) -> None:
    cluster = Cluster()
    cluster.waiting = waiting
    cluster.run(20, offered=offered, a=0.0)
    with pytest.raises(UnavailableError, match="no verifier does anything"):
        cluster.wanted()
    assert cluster.wanted(Role.ROUTER) == pytest.approx(waiting / 100)
    cluster.run(1, a=0.3)
    assert cluster.wanted() > 0.0


def test_what_is_refused_is_wanted_too() -> None:
    cluster = Cluster()
    cluster.run(20, offered=3, begun=2, a=1.0)
    assert cluster.wanted() == pytest.approx(1.5)


def test_refused_requests_that_come_again_and_again_do_not_multiply() -> None:
    cluster = Cluster()
    cluster.run(20, offered=500, begun=2, a=1.0)
    assert cluster.wanted() == pytest.approx(2.0)


def test_a_queue_that_is_worked_off_wants_no_less_than_what_works() -> None:
    cluster = Cluster()
    cluster.run(20, offered=1, begun=3, a=1.0)
    assert cluster.wanted() == pytest.approx(1.0)


def test_what_other_routers_refuse_counts() -> None:
    cluster = Cluster()
    cluster.run(20, offered=2, begun=2, a=1.0)
    cluster.autoscaler.heard(Demand(offered=120, begun=60))  # beside 38 and 38
    assert cluster.wanted() == pytest.approx((120 + 38) / (60 + 38))


def test_half_busy_speculators_are_enough() -> None:
    cluster = Cluster()
    for _ in range(20):
        cluster.drafting += 1.0
        cluster.run(1, a=0.1)
    assert cluster.wanted(Role.SPECULATOR) == pytest.approx(2.0)


def test_routers_are_wanted_by_the_requests_in_progress_at_all_of_them() -> None:
    cluster = Cluster()
    cluster.sequences, cluster.waiting = 150, 20
    cluster.run(20, a=1.0, b=1.0)
    cluster.autoscaler.heard(Demand(waiting=30))
    assert cluster.wanted(Role.ROUTER) == pytest.approx(3.5)  # of 100 each


@pytest.mark.parametrize("role", Role)
def test_without_a_verifier_nothing_is_known(role: Role) -> None:
    cluster = Cluster()
    cluster.run(20)
    with pytest.raises(UnavailableError, match="no verifier"):
        cluster.wanted(role)


@pytest.mark.parametrize("role", Role)
def test_a_verifier_that_does_not_report_is_not_idle(role: Role) -> None:
    cluster = Cluster()
    cluster.run(20, a=1.0)
    cluster.work["b"] = None
    cluster.look()
    with pytest.raises(UnavailableError, match="b did not report"):
        cluster.wanted(role)
    cluster.run(1, a=1.0, b=0.0)
    assert cluster.wanted(role) is not None


@pytest.mark.parametrize("role", Role)
def test_a_router_that_has_just_started_says_nothing(role: Role) -> None:
    cluster = Cluster()
    with pytest.raises(UnavailableError):
        cluster.wanted(role)
    cluster.run(5, a=1.0)
    with pytest.raises(UnavailableError, match="4 s"):
        cluster.wanted(role)


def test_when_all_verifiers_are_lost_what_was_before_does_not_count() -> None:
    cluster = Cluster()
    cluster.run(30, a=1.0)
    cluster.work.clear()
    cluster.run(5)
    cluster.run(5, a=1.0)
    with pytest.raises(UnavailableError):
        cluster.wanted()
    cluster.run(10, a=1.0)
    assert cluster.wanted() == pytest.approx(1.0)


def test_without_speculators_nobody_knows_how_many_are_wanted() -> None:
    cluster = Cluster()
    cluster.speculators = 0
    cluster.run(20, a=1.0)
    assert cluster.wanted() == pytest.approx(1.0)
    with pytest.raises(UnavailableError, match="no speculator"):
        cluster.wanted(Role.SPECULATOR)
