"""A simulated router: its own queue, dispatcher, placement and streams, and one client for each request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import cast

from treeserve_core.errors import OverloadedError, UnavailableError
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_router.admission import RouterRequest, tenant_label
from treeserve_router.autoscaling import Autoscaler
from treeserve_router.decode_stream import DecodeCall
from treeserve_router.dispatcher import Dispatcher
from treeserve_router.load_watch import LoadWatch
from treeserve_router.mailbox import Mailbox
from treeserve_router.main import make_queue
from treeserve_router.pool import VerifierPool
from treeserve_router.queue import Ticket
from treeserve_router.shared_state import SharedState
from treeserve_router.tenants import Tenants
from treeserve_router.verifier_link import VerifierLink
from treeserve_simulator.client import Answer
from treeserve_simulator.decode_call import RouterEnd
from treeserve_simulator.record import Record
from treeserve_simulator.systems import Cluster, System
from treeserve_simulator.text import IDENTITY, Text
from treeserve_simulator.trace import TraceRequest


class SimulatedRouter:
    """One router without servers, tokenizer and Redis, wired as the service's `main` wires the rest.

    Args:
        texts: by request id; this router adds what its requests will say.
        connect: by address, opens a stream to a verifier.
        tasks: where its work runs: what fails there fails the simulation.
        seed: of all texts.
    """

    def __init__(
        self,
        cluster: Cluster,
        system: System,
        texts: dict[str, Text],
        connect: Mapping[str, Callable[[], RouterEnd]],
        tasks: asyncio.TaskGroup,
        seed: int,
    ) -> None:
        clock = asyncio.get_running_loop().time
        config = cluster.router_config(system)
        self._cluster = cluster
        self._system = system
        self._texts = texts
        self._seed = seed
        self._clock = clock
        self._config = config
        self._pool = VerifierPool(self._link)
        self._queue = make_queue(config, Tenants(config.tenants), clock)
        self._dispatcher = Dispatcher(
            self._queue, self._pool, config.verifier_wait_s, clock, policies=config.dispatch_policies
        )
        self._affinity = SharedState(config, self._pool, lambda seconds: None, clock).book
        self._connected = asyncio.Event()
        self._pool.subscribe(self._look_at_pool)
        self.connect(connect)
        self._task = tasks.create_task(self._dispatcher.run())

    def connect(self, connect: Mapping[str, Callable[[], RouterEnd]]) -> None:
        """Use these verifiers and no others; sequences of others run to their end."""
        self._connect = connect
        self._pool.update(connect)

    def load_watch(self, autoscaler: Autoscaler) -> LoadWatch:
        """What tells an autoscaler of the load. It runs for ever: while it does, nothing can be found to hang."""
        return LoadWatch(autoscaler, self._pool, self._dispatcher, self._queue, asyncio.get_running_loop().time)

    async def ready(self) -> None:
        """Wait until every verifier is connected."""
        await self._connected.wait()

    async def close(self) -> None:
        """Stop, and break the links."""
        self._task.cancel()
        await self._pool.close()

    async def generate(self, number: int, request: TraceRequest) -> Record:
        """Run one request, as its client sees it.

        Args:
            number: unique among the requests.
        """
        overheads = self._cluster.machine.overheads
        sent_s = self._clock()
        await asyncio.sleep(overheads.request_ms / 1e3)
        admitted = self._admitted(number, request)
        answer = Answer(request, sent_s, overheads.reply_ms / 1e3, self._clock, partial(self._queue.charge, admitted))
        try:
            return await self._run(admitted, answer)
        finally:
            del self._texts[admitted.request_id]

    async def _run(self, request: RouterRequest, answer: Answer) -> Record:
        hints = await self._affinity.find(request)
        ticket: Ticket | None = None
        while not answer.is_over:
            ticket = Ticket(
                request,
                tuple(answer.token_ids),
                Mailbox(),
                preferred_verifier=hints.preferred_verifier,
                session_epoch=hints.session_epoch,
                prefix_tokens=hints.prefix_tokens,
                is_replay=ticket is not None,
            )
            try:
                self._dispatcher.submit(ticket)
                await answer.follow(ticket.mailbox, self._config.max_replays)
            except OverloadedError:
                return answer.record("shed")
            except UnavailableError:
                return answer.record("failed")
            finally:
                self._dispatcher.withdraw(ticket)
        self._affinity.note(request, hints, answer.verifier_id, answer.token_ids)
        return answer.record("finished")

    def _admitted(self, number: int, request: TraceRequest) -> RouterRequest:
        request_id = f"r{number}"
        kind = self._cluster.machine.kind(request.kind)
        length = request.prompt_tokens + request.output_tokens
        text = Text(self._key(request.session or request_id), kind, length, request.prompt_tokens)
        self._texts[request_id] = text
        return RouterRequest(
            request_id=request_id,
            prompt_token_ids=tuple(text.token_ids[: request.prompt_tokens]),
            generated_token_ids=(),
            sampling=SamplingParams(),
            stopping=StoppingCriteria(max_tokens=request.output_tokens, ignore_eos=True),
            limits=self._limits(request),
            session_id=request.session,
            tenant=tenant_label(request.tenant),
        )

    def _limits(self, request: TraceRequest) -> SequenceLimits:
        if not self._system.keeps_promises:
            return SequenceLimits()
        asked = SequenceLimits(service_class=request.service_class)
        return self._config.service_levels.resolve(asked, class_given=True, values=lambda header: ())

    def _key(self, name: str) -> int:
        """What a conversation says follows from its name and the seed."""
        return int.from_bytes(hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest())

    def _look_at_pool(self) -> None:
        if len(self._pool.states()) == len(self._connect):
            self._connected.set()

    def _link(self, address: str, on_change: Callable[[], None]) -> VerifierLink:
        @contextlib.asynccontextmanager
        async def dial(address: str) -> AsyncIterator[DecodeCall]:
            yield cast("DecodeCall", self._connect[address]())

        rng = random.Random(self._seed)
        return VerifierLink(address, IDENTITY, "router", self._config.token_credit, on_change, rng, dial)
