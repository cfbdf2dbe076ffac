"""How much a verifier is given at a time, and to which class its places are open."""

from __future__ import annotations

from typing import Any

import pytest
from support.tickets import ticket

from treeserve_core.qos import QosPolicy
from treeserve_core.sampling import ServiceClass
from treeserve_router.batcher import Batcher, BatchLimits, Obstacle
from treeserve_router.latency_model import Latency
from treeserve_router.placement import Backlog, VerifierState

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass
LIMITS = BatchLimits(min_requests=4, max_requests=16, max_prefill_s=1.0, max_tokens=1000, high_kv_use=0.8)


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(limits=LIMITS)


def verifier(**changes: Any) -> VerifierState:
    defaults: dict[str, Any] = {
        "max_context_tokens": 4096,
        "max_sequences": 32,
        "sequences": 2,
        "free_blocks": 100,
        "total_blocks": 100,
        "block_size": 16,
    }
    return VerifierState("host:a", "a", **(defaults | changes))


def starting(requests: int, tokens: int, of: ServiceClass = REALTIME) -> tuple[Backlog, ...]:
    """What starts, all of one class."""
    return tuple(Backlog(requests, tokens) if c >= of else Backlog() for c in ServiceClass)


class TestSize:
    def test_short_prompts_go_in_sixteens_and_long_ones_in_fours(self, batcher: Batcher) -> None:
        short, long = ticket(prompt_tokens=10), ticket(prompt_tokens=600)
        assert batcher.obstacle(short, verifier(starting=starting(15, 150))) is None
        assert batcher.obstacle(short, verifier(starting=starting(16, 160))) is Obstacle.STARTING
        assert batcher.obstacle(long, verifier(starting=starting(3, 1800))) is None
        assert batcher.obstacle(long, verifier(starting=starting(4, 2400))) is Obstacle.STARTING

    def test_prompt_tokens_bound_what_lies_between(self, batcher: Batcher) -> None:
        state = verifier(starting=starting(6, 900))
        assert batcher.obstacle(ticket(prompt_tokens=100), state) is None
        assert batcher.obstacle(ticket(prompt_tokens=101), state) is Obstacle.STARTING

    def test_what_the_verifier_holds_already_does_not_count(self, batcher: Batcher) -> None:
        state = verifier(starting=starting(6, 900))
        assert batcher.obstacle(ticket(prompt_tokens=500, prefix_tokens={"a": 400}), state) is None
        assert batcher.obstacle(ticket(prompt_tokens=500, prefix_tokens={"b": 400}), state) is Obstacle.STARTING

    def test_a_known_prefill_rate_sets_the_bound(self, batcher: Batcher) -> None:
        mine = ticket(prompt_tokens=500)
        fast, slow = Latency(prefill_tokens_per_s=5000), Latency(prefill_tokens_per_s=200)
        assert batcher.obstacle(mine, verifier(starting=starting(6, 4000), latency=fast)) is None
        assert batcher.obstacle(mine, verifier(starting=starting(6, 100), latency=slow)) is Obstacle.STARTING

    def test_limits_halve_at_eighty_per_cent_kv_use(self, batcher: Batcher) -> None:
        short = ticket(prompt_tokens=10)
        for free, most, fewest, most_tokens in ((21, 16, 4, 1000), (20, 8, 2, 500)):
            state = {"free_blocks": free, "starting": starting(most - 1, 10)}
            assert batcher.obstacle(short, verifier(**state)) is None
            state["starting"] = starting(most, 10)
            assert batcher.obstacle(short, verifier(**state)) is Obstacle.STARTING
            state["starting"] = starting(fewest, most_tokens - 10)
            assert batcher.obstacle(short, verifier(**state)) is None
            state["starting"] = starting(fewest, most_tokens - 9)
            assert batcher.obstacle(short, verifier(**state)) is Obstacle.STARTING
            state["starting"] = starting(fewest - 1, 5000)  # whatever their length
            assert batcher.obstacle(short, verifier(**state)) is None

    def test_by_default_a_dispatch_is_four_to_sixteen(self) -> None:
        for free, most in ((100, 16), (20, 8)):
            for length, limit in ((10, most), (4000, most // 2)):
                taken = next(
                    n
                    for n in range(20)
                    if Batcher().obstacle(
                        ticket(prompt_tokens=length),
                        verifier(free_blocks=free * 100, total_blocks=10_000, starting=starting(n, n * length)),
                    )
                )
                assert taken == limit

    def test_less_urgent_prompts_do_not_hold_up_urgent_ones(self, batcher: Batcher) -> None:
        state = verifier(starting=starting(16, 5000, of=BATCH))
        assert batcher.obstacle(ticket(BATCH), state) is Obstacle.STARTING
        assert batcher.obstacle(ticket(STANDARD), state) is None


class TestPlaces:
    def test_the_last_place_is_kept_for_realtime(self, batcher: Batcher) -> None:
        almost_full, full = verifier(sequences=31), verifier(sequences=32)
        for service_class in (INTERACTIVE, STANDARD, BATCH):
            assert batcher.obstacle(ticket(service_class), verifier(sequences=30)) is None
            assert batcher.obstacle(ticket(service_class), almost_full) is Obstacle.RESERVED
        assert batcher.obstacle(ticket(REALTIME), almost_full) is None
        assert batcher.obstacle(ticket(REALTIME), full) is Obstacle.NO_PLACE

    def test_reserves_of_all_more_urgent_classes_add_up(self) -> None:
        batcher = Batcher({REALTIME: QosPolicy(reserved_slots=2), INTERACTIVE: QosPolicy(reserved_slots=3)})
        open_places = {REALTIME: 32, INTERACTIVE: 30, STANDARD: 27, BATCH: 27}
        for service_class, places in open_places.items():
            assert batcher.obstacle(ticket(service_class), verifier(sequences=places - 1)) is None
            assert batcher.obstacle(ticket(service_class), verifier(sequences=places)) is not None

    def test_a_verifier_of_one_place_serves_everybody(self, batcher: Batcher) -> None:
        assert batcher.obstacle(ticket(BATCH), verifier(max_sequences=1, sequences=0)) is None

    def test_without_policies_nothing_is_kept(self) -> None:
        assert Batcher({}).obstacle(ticket(BATCH), verifier(sequences=31)) is None

    def test_one_that_refused_is_left_alone(self, batcher: Batcher) -> None:
        assert batcher.obstacle(ticket(REALTIME), verifier(holding_off=True)) is Obstacle.HELD_OFF


class TestBlocks:
    def test_a_prompt_needs_its_blocks_and_one_to_grow(self, batcher: Batcher) -> None:
        mine = ticket(prompt_tokens=33)  # three blocks of 16, and one
        assert batcher.obstacle(mine, verifier(free_blocks=4)) is None
        assert batcher.obstacle(mine, verifier(free_blocks=3)) is Obstacle.NO_BLOCKS

    def test_blocks_that_others_are_about_to_take_are_not_free(self, batcher: Batcher) -> None:
        mine = ticket(prompt_tokens=33)
        assert batcher.obstacle(mine, verifier(free_blocks=10, pending_blocks=6)) is None
        assert batcher.obstacle(mine, verifier(free_blocks=10, pending_blocks=7)) is Obstacle.NO_BLOCKS

    def test_an_empty_verifier_takes_anything_it_can_serve(self, batcher: Batcher) -> None:
        mine = ticket(prompt_tokens=2000)
        assert batcher.obstacle(mine, verifier(sequences=0, free_blocks=5)) is None

    def test_before_the_first_report_nothing_is_known(self, batcher: Batcher) -> None:
        assert batcher.obstacle(ticket(), verifier(free_blocks=0, total_blocks=0)) is None


class TestPausing:
    @pytest.mark.parametrize("lacking", [{"sequences": 32}, {"free_blocks": 0}])
    def test_urgent_ones_exceed_a_full_verifier_that_can_pause_something(
        self, batcher: Batcher, lacking: dict[str, int]
    ) -> None:
        assert batcher.obstacle(ticket(REALTIME), verifier(**lacking, preemptible=1)) is None
        assert batcher.obstacle(ticket(REALTIME), verifier(**lacking, preemptible=0)) is not None

    def test_every_one_on_its_way_takes_one_of_those_that_can_be_paused(self, batcher: Batcher) -> None:
        assert batcher.obstacle(ticket(REALTIME), verifier(sequences=34, preemptible=3, unreported=2)) is None
        assert batcher.obstacle(ticket(REALTIME), verifier(sequences=35, preemptible=3, unreported=3)) is not None

    def test_others_wait(self, batcher: Batcher) -> None:
        full = verifier(sequences=32, preemptible=32)
        for waiting in (ticket(INTERACTIVE), ticket(STANDARD), ticket(BATCH), ticket(REALTIME, preemptible=True)):
            assert batcher.obstacle(waiting, full) is Obstacle.NO_PLACE
