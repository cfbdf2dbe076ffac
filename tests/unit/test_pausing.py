"""Who runs when there is not room for all: order of admission, pausing within a step, and that nobody starves."""

from __future__ import annotations

import random

import pytest
from support.virtual_verifier import VirtualVerifier

from treeserve_core.sampling import ServiceClass
from treeserve_verifier.sequence import Sequence

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass


def batch(verifier: VirtualVerifier, prompt_len: int = 20, max_tokens: int = 400) -> Sequence:
    return verifier.submit(prompt_len, max_tokens, BATCH, preemptible=True)


def realtime(verifier: VirtualVerifier, prompt_len: int = 20, max_tokens: int = 10) -> Sequence:
    return verifier.submit(prompt_len, max_tokens, REALTIME, ttft_ms=500, tpot_ms=30)


def started(verifier: VirtualVerifier) -> list[Sequence]:
    return verifier.scheduler.admit()


def test_class_comes_before_deadline_and_deadline_before_arrival() -> None:
    verifier = VirtualVerifier(max_sequences=8, reserved_sequences=0)
    expected = [
        verifier.submit(5, 5, BATCH),
        verifier.submit(5, 5, STANDARD),
        verifier.submit(5, 5, INTERACTIVE, ttft_ms=2000),
        verifier.submit(5, 5, INTERACTIVE, ttft_ms=1000),
        verifier.submit(5, 5, INTERACTIVE, ttft_ms=2000, waited_ms=1500),
        verifier.submit(5, 5, REALTIME, ttft_ms=500),
    ][::-1]
    assert started(verifier) == expected
    assert [c.sequence for c in verifier.scheduler.candidates(lambda s: None)] == expected, "and their prompts likewise"


def test_who_is_too_late_for_its_first_token_lets_others_be_in_time() -> None:
    verifier = VirtualVerifier()
    late = verifier.submit(5, 5, INTERACTIVE, ttft_ms=1000, waited_ms=1200)
    in_time = verifier.submit(5, 5, INTERACTIVE, ttft_ms=1000)
    standard = verifier.submit(5, 5, STANDARD, ttft_ms=100)
    fresh = verifier.submit(5, 5, STANDARD, ttft_ms=9000)
    batch_work = verifier.submit(5, 5, BATCH, ttft_ms=9000)
    assert started(verifier) == [in_time, standard, fresh, batch_work, late], "it counts as two classes less urgent"


def test_nobody_is_paused_twice_whoever_the_least_urgent_are() -> None:
    verifier = VirtualVerifier(max_sequences=4, reserved_sequences=0)
    late = verifier.submit(20, 400, STANDARD, preemptible=True, ttft_ms=100, waited_ms=200)
    running = [batch(verifier) for _ in range(3)]
    assert len(started(verifier)) == 4
    urgent = [verifier.submit(20, 10, STANDARD, ttft_ms=5000) for _ in range(3)]
    assert started(verifier) == urgent
    assert set(verifier.scheduler.waiting) == {late, *running[1:]}, "who is late goes before all, then the youngest"
    assert verifier.scheduler.pauses == 3


def test_who_is_late_for_its_first_token_gives_its_place_to_who_can_be_in_time() -> None:
    """Even to one of a less urgent class, and if it is not preemptible: its place is worth nothing to its target."""
    verifier = VirtualVerifier(max_sequences=1, reserved_sequences=0)
    late = verifier.submit(20, 10, INTERACTIVE, ttft_ms=100, waited_ms=200)
    assert started(verifier) == [late]
    in_time = verifier.submit(20, 10, STANDARD, ttft_ms=5000)
    assert started(verifier) == [in_time]
    another = verifier.submit(20, 10, INTERACTIVE, ttft_ms=100, waited_ms=200)
    verifier.run_all()
    assert all(len(verifier.emitted[each]) == 10 for each in (late, in_time, another)), "and comes to its end, too"
    assert verifier.scheduler.pauses == 1


def test_who_was_late_and_has_its_first_token_keeps_its_place() -> None:
    verifier = VirtualVerifier(max_sequences=1, reserved_sequences=0)
    late = verifier.submit(20, 100, STANDARD, ttft_ms=1, waited_ms=200)
    verifier.run(lambda: bool(verifier.emitted[late]))
    verifier.submit(20, 10, STANDARD, ttft_ms=5000)
    assert started(verifier) == []


def test_an_urgent_one_is_in_the_very_next_step() -> None:
    verifier = VirtualVerifier(max_sequences=4, reserved_sequences=0)
    running = [batch(verifier) for _ in range(4)]
    for _ in range(20):
        verifier.step()
    urgent = realtime(verifier)
    plan = verifier.step()
    assert urgent in [p.sequence for p in plan.sequences], "it does not wait for a place"
    assert len(verifier.emitted[urgent]) == 1, "and its whole prompt fits into the step"
    assert verifier.scheduler.pauses == 1 and verifier.scheduler.waiting == (running[-1],), "the youngest pays"
    verifier.run_all()
    assert all(len(verifier.emitted[s]) == 400 for s in running), "the paused one lost nothing"


def test_only_preemptible_and_less_urgent_ones_are_paused() -> None:
    verifier = VirtualVerifier(max_sequences=2, reserved_sequences=0)
    firm = [verifier.submit(5, 50, STANDARD), verifier.submit(5, 50, BATCH)]
    verifier.step()
    urgent = realtime(verifier)
    verifier.step()
    assert urgent in verifier.scheduler.waiting and set(verifier.scheduler.running) == set(firm)
    verifier.run(lambda: bool(verifier.emitted[urgent]))
    assert verifier.scheduler.pauses == 0
    equal = VirtualVerifier(max_sequences=1, reserved_sequences=0)
    first, second = batch(equal), batch(equal)
    for _ in range(5):
        equal.step()
    assert equal.scheduler.pauses == 0 and equal.scheduler.running == (first,) and equal.scheduler.waiting == (second,)


def test_places_beyond_all_others_are_for_realtime_sequences() -> None:
    verifier = VirtualVerifier(max_sequences=2, reserved_sequences=1)
    for _ in range(2):
        verifier.submit(5, 50, INTERACTIVE)
    waits = verifier.submit(5, 50, INTERACTIVE)
    verifier.step()
    urgent = realtime(verifier)
    verifier.step()
    assert len(verifier.scheduler.running) == 3 and urgent in verifier.scheduler.running
    assert verifier.scheduler.waiting == (waits,) and verifier.scheduler.pauses == 0
    early = VirtualVerifier(max_sequences=2, reserved_sequences=1)
    realtime(early)
    for _ in range(3):
        early.submit(5, 50, INTERACTIVE)
    early.step()
    assert len(early.scheduler.running) == 3, "and filled first, so that they take no place from others"


def test_an_urgent_one_that_finds_no_blocks_pauses_as_many_as_it_takes() -> None:
    verifier = VirtualVerifier(kv_tokens=16 * 64, max_context_tokens=1000, max_sequences=8)
    running = [batch(verifier, prompt_len=230, max_tokens=20) for _ in range(4)]
    verifier.run(lambda: all(verifier.emitted[s] for s in running))
    urgent = realtime(verifier, prompt_len=400)
    verifier.step()
    assert urgent in verifier.scheduler.running and verifier.scheduler.pauses == 2
    verifier.run_all()
    assert verifier.blocks.free_blocks == verifier.blocks.total_blocks


def test_nobody_is_paused_in_vain() -> None:
    verifier = VirtualVerifier(kv_tokens=16 * 64, max_context_tokens=1000, max_sequences=8)
    firm = verifier.submit(800, 100, STANDARD)
    small = batch(verifier, prompt_len=20)
    verifier.run(lambda: bool(verifier.emitted[firm]))
    urgent = realtime(verifier, prompt_len=400)
    verifier.step()
    assert small in verifier.scheduler.running and urgent in verifier.scheduler.waiting
    assert verifier.scheduler.pauses == 0


def test_a_paused_sequence_finds_its_kv_again() -> None:
    verifier = VirtualVerifier(max_sequences=1, reserved_sequences=0)
    paused = batch(verifier, prompt_len=200)
    verifier.run(lambda: len(verifier.emitted[paused]) == 30)
    computed = verifier.blocks.computed_len(paused.seq_id)
    urgent = realtime(verifier)
    verifier.run(lambda: urgent in verifier.ended)
    assert verifier.scheduler.admit() == [paused]
    assert verifier.scheduler.uncomputed(paused) <= 1 + computed % 16 + 16, "all but the last block"
    assert paused.cached_tokens == 0, "what it finds of its own was not there when it began"


@pytest.mark.parametrize("endless", [REALTIME, INTERACTIVE])
def test_batch_work_gets_on_though_urgent_work_never_ends(endless: ServiceClass) -> None:
    verifier = VirtualVerifier(max_sequences=2, reserved_sequences=0, ageing_s=0.5)
    patient = batch(verifier, max_tokens=50)
    rng = random.Random(4)
    verifier.step()
    while len(verifier.scheduler) and verifier.now < 60.0:
        while len(verifier.scheduler.waiting) < 4:
            verifier.submit(20, rng.randrange(5, 20), endless, ttft_ms=500, tpot_ms=30)
        verifier.step()
        if patient in verifier.ended:
            break
    assert patient in verifier.ended and verifier.now < 5.0
    assert verifier.scheduler.pauses > 0


def test_who_runs_does_not_age() -> None:
    verifier = VirtualVerifier(max_sequences=1, reserved_sequences=0, ageing_s=0.1)
    batch(verifier)
    while verifier.now < 1.0:
        verifier.step()
    urgent = realtime(verifier)
    verifier.step()
    assert verifier.scheduler.running == (urgent,)


def test_without_ageing_it_would_starve() -> None:
    verifier = VirtualVerifier(max_sequences=2, reserved_sequences=0, ageing_s=1e9)
    patient = batch(verifier, max_tokens=50)
    verifier.step()
    while verifier.now < 5.0:
        while len(verifier.scheduler.waiting) < 4:
            realtime(verifier)
        verifier.step()
    assert patient not in verifier.ended


def test_a_pool_full_to_the_last_block_never_hangs() -> None:
    """Many more tokens than the pool holds, of all classes: everything ends, and every block is free."""
    rng = random.Random(8)
    verifier = VirtualVerifier(kv_tokens=16 * 40, max_context_tokens=600, max_sequences=12)
    everyone = []
    for _ in range(60):
        service_class = rng.choice(list(ServiceClass))
        everyone.append(
            verifier.submit(
                rng.randrange(1, 300), rng.randrange(1, 200), service_class, preemptible=service_class is BATCH
            )
        )
        for _ in range(rng.randrange(8)):
            verifier.step()
    verifier.run(lambda: len(verifier.scheduler) == 0, most_steps=20_000)
    assert verifier.fullest >= 0.99 * verifier.blocks.total_blocks and verifier.scheduler.preemptions > 0
    assert all(len(verifier.emitted[s]) == s.submission.stopping.max_tokens for s in everyone)
    assert verifier.blocks.free_blocks == verifier.blocks.total_blocks


def test_sequences_of_one_prefix_share_its_blocks_and_so_more_of_them_run() -> None:
    verifier = VirtualVerifier(kv_tokens=16 * 64, max_context_tokens=1000, max_sequences=8)

    def submit() -> Sequence:
        sequence = batch(verifier, prompt_len=640, max_tokens=20)
        object.__setattr__(sequence.submission, "tenant", "one of all")
        return sequence

    first = submit()
    verifier.run(lambda: bool(verifier.emitted[first]))
    others = [submit() for _ in range(5)]
    verifier.step()
    assert set(verifier.scheduler.running) == {first, *others}
    assert others[0].cached_tokens == 624, "all whole blocks before the last token"


def test_the_kv_of_a_session_outlives_that_of_others() -> None:
    verifier = VirtualVerifier(kv_tokens=16 * 64, max_context_tokens=1000, session_lease_s=1e6)
    cached = {}
    for session in ("", "s"):
        verifier.run_all()
        first = verifier.submit(320, 2)
        object.__setattr__(first.submission, "session_id", session)
        verifier.run_all()
        for _ in range(2):
            verifier.submit(500, 2)
            verifier.run_all()
        again = verifier.submit(320, 2)
        object.__setattr__(again.submission, "tenant", first.submission.tenant)
        verifier.run_all()
        cached[session] = again.cached_tokens
    assert cached[""] <= 16 and cached["s"] == 304
