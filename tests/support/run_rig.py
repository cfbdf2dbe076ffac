"""A whole verify loop in this process, over a small native decoder with a native drafter."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from support.int8_decoders import NativeModel, Sizes, random_model
from support.sequences import make_config
from treeserve_core.outcome import FinishReason, PositionLogProbs, SpeculationStats
from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.runner import ModelRunner
from treeserve_speculator.drafter import TreeLimits
from treeserve_speculator.metrics import SpeculatorMetrics
from treeserve_speculator.native_drafter import NativeDrafter
from treeserve_verifier.colocated import ColocatedOutbox, Drafter
from treeserve_verifier.cost_model import CostModel
from treeserve_verifier.decode_run import FinishedRun, RunPlan
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.executor import StepExecutor
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Emission, Sequence, Submission

VOCAB = 203
EOS = 202
SOURCES = ("ngram", "suffix", "recycling")
RUN_S = 0.02
PROMPT = [5, 9, 5, 9, 7, 5, 9, 5]
_PLAIN = random_model(Sizes(num_layers=1, is_tied=True))
_ids = itertools.count(1)


@dataclass
class Generation:
    """What came of a request."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[PositionLogProbs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    stats: SpeculationStats | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, emission: Emission) -> None:
        """An emission left for it."""
        assert emission.offset == len(self.token_ids), "nothing lost, nothing twice"
        self.token_ids += emission.token_ids
        self.log_probs += emission.log_probs
        self.stats = emission.stats or self.stats
        self.finish_reason, self.error = emission.finish_reason, emission.error
        if emission.finish_reason is not None or emission.error is not None:
            self.ended.set()


class FixedCosts(CostModel):
    """Learns nothing: passes over so small a model cost nothing beside the Python around them."""

    def observe(self, *_: Any) -> None:
        """Nothing."""


class RecordingExecutor(StepExecutor):
    """Keeps the runs of steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.runs: list[FinishedRun] = []

    async def run_on(self, plan: RunPlan, meanwhile: Any) -> FinishedRun:
        """Run it."""
        self.runs.append(await super().run_on(plan, meanwhile))
        return self.runs[-1]


class RunRig:
    """Greedy requests loop soon, so that drafts from their own text come true.

    Args:
        run_s: how long a run of steps may take; 0 for none.
        drafter: what drafts here; None for nothing.
        config: fields that differ from those of a small verifier.
    """

    def __init__(self, run_s: float, drafter: Drafter | None = None, **config: Any) -> None:
        self.config = make_config(**{"kv_tokens": 2048, "max_context_tokens": 512, **config})
        model = NativeModel(_PLAIN)
        self.registry = CollectorRegistry()
        self.runner = ModelRunner(model, self.config.kv_tokens // self.config.block_size, self.config.block_size)
        self.blocks = self.runner.blocks
        self.cost = FixedCosts({1: 1.0, 16: 1.1, 64: 3.0})
        planner, clock = StepPlanner(self.config, self.cost), time.monotonic
        self._thread = ThreadPoolExecutor(1)
        self.executor = RecordingExecutor(self.runner, self._thread, VOCAB)
        self.desk = DraftDesk(
            clock,
            0.0,
            lambda s: planner.draft_budget(s, len(self.scheduler.running)),
            lambda: planner.prices(len(self.scheduler.running)),
        )
        self.ended: list[Sequence] = []
        self.scheduler = Scheduler(self.config, self.blocks, self._end, clock)
        self.colocated = None if drafter is None else ColocatedOutbox(drafter)
        self.loop = VerifyLoop(
            self.scheduler,
            self.desk,
            planner,
            self.executor,
            self.cost,
            VerifierMetrics(self.registry),
            clock,
            run_s,
            self.colocated,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RunRig:
        self._task = asyncio.create_task(self.loop.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        dead = self._task.done()
        self._task.cancel()
        done = await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()
        assert not dead, f"the loop ended: {done}"

    def submit(
        self,
        prompt: SequenceOf[int],
        max_tokens: int = 40,
        *,
        limits: SequenceLimits | None = None,
        stopping: dict[str, Any] | None = None,
        generated: SequenceOf[int] = (),
        session: str = "",
        **sampling: Any,
    ) -> tuple[Sequence, Generation]:
        """Begin a request."""
        generation = Generation(list(generated))
        submission = Submission(
            request_id="test",
            prompt_token_ids=tuple(prompt),
            generated_token_ids=tuple(generated),
            sampling=SamplingParams(**sampling),
            stopping=StoppingCriteria(max_tokens=max_tokens, **(stopping or {})),
            limits=limits or SequenceLimits(),
            tenant="somebody",
            session_id=session,
        )
        sampler = SequenceSampler(
            submission.sampling,
            submission.stopping,
            prompt,
            eos_token_ids=(EOS,),
            vocab_size=VOCAB,
            generated_token_ids=generated,
        )
        sequence = Sequence(next(_ids), submission, generation.take, sampler, None, [*prompt, *generated])
        self.loop.submit(sequence)
        return sequence, generation

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def _end(self, sequence: Sequence) -> None:
        self.ended.append(sequence)
        self.desk.close(sequence)


def native_drafter(registry: CollectorRegistry | None = None) -> NativeDrafter:
    """A drafter with all sources that need no file."""
    return NativeDrafter(
        SOURCES,
        None,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        limits=TreeLimits(8, 16),
        metrics=SpeculatorMetrics(registry or CollectorRegistry()),
    )


async def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds, five seconds at most."""
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


async def generate(rig: RunRig, asked: list[dict[str, Any]], at_once: int) -> list[Generation]:
    """What comes of these requests, so many of them at a time."""
    slots = asyncio.Semaphore(at_once)

    async def one(request: dict[str, Any]) -> Generation:
        async with slots:
            _, generation = rig.submit(**request)
            await asyncio.wait_for(generation.ended.wait(), 20)
            return generation

    return await asyncio.gather(*map(one, asked))
