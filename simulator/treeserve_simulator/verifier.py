"""A simulated verifier: its own scheduler, planner, desk, loop and stream, around steps that compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from treeserve_core.proposal import DraftProposal
from treeserve_engine.block_manager import BlockManager
from treeserve_simulator.costs import MachineModel
from treeserve_simulator.decode_call import DecodeCallPair, RouterEnd
from treeserve_simulator.executor import SimulatedExecutor
from treeserve_simulator.speculator import SimulatedSpeculator
from treeserve_simulator.text import IDENTITY, Text
from treeserve_text.tokenizer import Tokenizer
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import MOST_MEASURED_CONTEXT, CostModel
from treeserve_verifier.decode_stream import DecodeHandler
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.executor import ExecutedStep, StepExecutor
from treeserve_verifier.intake import Intake
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.session_fence import SessionFence
from treeserve_wire.server import ServicerContext

_NO_TOKENIZER = cast("Tokenizer", None)  # only stop strings need one, and a trace has none


class _NoMetrics(VerifierMetrics):
    """Nobody scrapes a simulation, and counting takes a twentieth of its time."""

    def count(self, step: ExecutedStep, source_names: Callable[[int], list[str]]) -> None:
        """Count nothing."""

    def count_gaps(self, gaps_s: Iterable[float]) -> None:
        """Count nothing."""


class SimulatedVerifier:
    """One verifier with one speculator, wired as the service's `main` wires them. Built inside the event loop.

    Args:
        texts: by request id, what each sequence will say.
        tasks: where its work runs: what fails there fails the simulation.
        speculates: whether a speculator is attached.
    """

    def __init__(
        self,
        config: VerifierConfig,
        machine: MachineModel,
        texts: Mapping[str, Text],
        tasks: asyncio.TaskGroup,
        *,
        speculates: bool,
    ) -> None:
        clock = asyncio.get_running_loop().time
        cost = CostModel.measure(machine.costs.logits_pass_ms, machine.costs.prefill_pass_ms, MOST_MEASURED_CONTEXT)
        planner = StepPlanner(config, CostModel.free_rows() if config.draft_always else cost)
        self.blocks = BlockManager(config.kv_tokens // config.block_size, config.block_size, clock=clock)
        self.executor = SimulatedExecutor(machine, self.blocks, texts)
        self._network_s = machine.overheads.network_ms / 1e3
        self._desk = DraftDesk(
            clock,
            config.draft_wait_ms / 1e3,
            lambda s: planner.draft_budget(s, len(self.scheduler.running)),
            lambda: planner.prices(len(self.scheduler.running)),
        )
        self.scheduler = Scheduler(config, self.blocks, self._desk.close, clock, token_ms=lambda: cost.prefill_ms(1, 0))
        self._loop = VerifyLoop(
            self.scheduler,
            self._desk,
            planner,
            cast("StepExecutor", self.executor),
            cost,
            _NoMetrics(CollectorRegistry()),
            clock,
            config.emit_interval_ms / 1e3,
        )
        intake = Intake(config, IDENTITY, _NO_TOKENIZER, NoOpTracer(), SessionFence(clock))
        self._decode = DecodeHandler(config, IDENTITY, self._loop, intake, self.blocks.total_blocks)
        self._loop.observers.append(self._decode.update)
        self._group = tasks
        self._tasks = [tasks.create_task(self._loop.run())]
        if speculates:
            self._attach(machine, texts, config.max_depth)

    def connect(self) -> RouterEnd:
        """A router's stream to it."""
        pair = DecodeCallPair(self._network_s)
        context = cast("ServicerContext", pair.verifier)
        self._tasks.append(self._group.create_task(self._decode.serve(pair.verifier.requests(), context)))
        return pair.router

    def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()

    def _attach(self, machine: MachineModel, texts: Mapping[str, Text], max_depth: int) -> None:
        def propose(handle: int, proposal: DraftProposal) -> None:
            self._loop.propose(attached, handle, proposal)

        outbox = SimulatedSpeculator(machine.overheads, texts, max_depth, propose)
        attached = self._loop.attach("speculator", ("simulated",), outbox, wants_top_tokens=False)
