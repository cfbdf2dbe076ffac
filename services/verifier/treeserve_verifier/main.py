"""Builds a verifier from its configuration and runs it until SIGTERM."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import structlog
from opentelemetry import trace

from treeserve.verifier.v1 import verifier_pb2, verifier_pb2_grpc
from treeserve_core.errors import InvalidArgumentError
from treeserve_core.identity import ModelIdentity
from treeserve_engine.exactness import measure_divergence
from treeserve_engine.kv_storage import TierBytes
from treeserve_engine.loading import load_model
from treeserve_engine.memory_limits import available_bytes
from treeserve_engine.memory_plan import MemoryPlan, ModelSizes, megabytes
from treeserve_engine.precision import Precision, choose_precision
from treeserve_engine.runner import ModelRunner
from treeserve_text.tokenizer import Tokenizer
from treeserve_verifier.colocated import build_colocated
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.cost_model import MOST_MEASURED_CONTEXT, MOST_MEASURED_ROWS, CostModel
from treeserve_verifier.decode_stream import DecodeHandler
from treeserve_verifier.draft_stream import DraftHandler
from treeserve_verifier.drafting import DraftDesk
from treeserve_verifier.executor import StepExecutor
from treeserve_verifier.intake import Intake
from treeserve_verifier.loop import VerifyLoop
from treeserve_verifier.metrics import VerifierMetrics
from treeserve_verifier.planner import StepPlanner
from treeserve_verifier.scheduler import Scheduler
from treeserve_verifier.sequence import Sequence
from treeserve_verifier.servicer import VerifierServicer
from treeserve_verifier.session_fence import SessionFence
from treeserve_verifier.timing import forward_ms, prefill_ms
from treeserve_wire.process import run_service, settle_in
from treeserve_wire.server import ServiceServer
from treeserve_wire.telemetry import setup_tracing, start_metrics
from treeserve_wire.tls import Tls

_log = structlog.get_logger(__name__)
SERVICE_NAME = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
_STOP_GRACE_S = 1.0
_MB = 1_000_000


@dataclass(frozen=True)
class Engine:
    """The loaded model.

    Attributes:
        precision: what it computes with.
        divergence: how far a token's logits depend on what is computed with it: 0 where output is exact.
        thread: where it was loaded and where all its steps run.
    """

    runner: ModelRunner
    tokenizer: Tokenizer
    identity: ModelIdentity
    cost: CostModel
    precision: Precision
    divergence: float
    thread: ThreadPoolExecutor


def load_engine(config: VerifierConfig) -> Engine:
    """Load the model, allocate the KV cache and measure what steps cost.

    Raises:
        InvalidArgumentError: if the model cannot be served, with the reason.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
    return thread.submit(_load, config, thread).result()


def _load(config: VerifierConfig, thread: ThreadPoolExecutor) -> Engine:
    tokenizer = Tokenizer.from_folder(config.model_folder)
    precision = choose_precision(config.model_folder, config.dtype, config.kv_dtype, config.device)
    _log.info("precision", dtype=precision.dtype, kv_dtype=precision.kv_dtype, reason=precision.reason)
    _check_memory(config, precision)
    model = load_model(
        config.model_folder,
        dtype=precision.dtype,
        kv_dtype=precision.kv_dtype,
        device=config.device,
        threads=config.threads,
        cache_dir=config.cache_dir,
    )
    vocab_size = model.config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise InvalidArgumentError("model", f"the tokenizer has {tokenizer.vocab_size} ids, the model {vocab_size}")
    tiers = TierBytes(config.kv_host_mb * _MB, config.kv_disk_mb * _MB, config.kv_disk_folder)
    runner = ModelRunner(model, config.kv_tokens // config.block_size, config.block_size, tiers=tiers)
    room = _check_room(model.config.max_position_embeddings, runner.blocks.total_blocks * config.block_size)
    cost = CostModel.measure(
        functools.partial(forward_ms, runner),
        functools.partial(prefill_ms, runner),
        most_context=min(MOST_MEASURED_CONTEXT, room - MOST_MEASURED_ROWS),
        most_rows=min(config.step_rows, room),
    )
    divergence = measure_divergence(model)
    if not math.isfinite(divergence):
        raise InvalidArgumentError("model", "computes logits that are not finite: its weights are damaged")
    if divergence > 0:
        _log.warning("logits depend on the batch here: output may change with speculation", divergence=divergence)
    _log.info("engine ready", cost_ms={rows: round(ms, 2) for rows, ms in cost.table.items()}, divergence=divergence)
    identity = ModelIdentity(
        config.model_name, tokenizer.hash, tokenizer.vocab_size, vocab_size, tokenizer.eos_token_ids
    )
    return Engine(runner, tokenizer, identity, cost, precision, divergence, thread)


def _check_room(window: int, kv_tokens: int) -> int:
    """Tokens for which there is room. What is measured at start-up must fit into window and KV cache."""
    for field, tokens in (("model", window), ("kv_tokens", kv_tokens)):
        if tokens < MOST_MEASURED_ROWS:
            raise InvalidArgumentError(field, f"has room for {tokens} tokens; at least {MOST_MEASURED_ROWS} are needed")
    return min(window, kv_tokens)


def _check_memory(config: VerifierConfig, precision: Precision) -> None:
    plan = MemoryPlan.of(
        ModelSizes.of(config.model_folder),
        precision,
        device=config.device,
        num_blocks=config.kv_tokens // config.block_size,
        block_size=config.block_size,
        rows=config.step_rows,
        spilled=config.kv_host_mb * _MB,
    )
    available = available_bytes(config.device)
    _log.info("memory plan", **plan.table(), available=megabytes(available))
    plan.check(available)
    on_host = available_bytes("cpu")
    if config.kv_host_mb * _MB > on_host:  # beside a GPU, whose memory the plan is of
        raise InvalidArgumentError("kv_host_mb", f"is more than this machine's {megabytes(on_host)}")


class Verifier:
    """One running verifier. Built inside the event loop. Its context window is never wider than the model's."""

    def __init__(
        self,
        config: VerifierConfig,
        engine: Engine,
        tracer: trace.Tracer,
        metrics: VerifierMetrics,
        tls: Tls | None,
    ) -> None:
        window = engine.runner.model.config.max_position_embeddings
        config = replace(
            config,
            max_context_tokens=min(config.max_context_tokens, window),
            dtype=engine.precision.dtype,
            kv_dtype=engine.precision.kv_dtype,
        )
        self._config = config
        self._metrics = metrics
        self.blocks = engine.runner.blocks
        self._thread = engine.thread
        planner = StepPlanner(config, CostModel.free_rows() if config.draft_always else engine.cost)
        clock = time.monotonic  # uvloop's own counts milliseconds: as long as a tree takes
        executor = StepExecutor(engine.runner, engine.thread, engine.identity.vocab_size)
        self._desk = DraftDesk(
            clock,
            config.draft_wait_ms / 1e3,
            lambda s: planner.draft_budget(s, len(self._scheduler.running)),
            lambda: planner.prices(len(self._scheduler.running)),
            executor.feature_shape,
        )
        self._scheduler = Scheduler(
            config,
            self.blocks,
            self._sequence_ended,
            clock,
            token_ms=lambda: engine.cost.prefill_ms(1, 0),
            compute_last=self._computed_last,
        )
        self.loop = VerifyLoop(
            self._scheduler,
            self._desk,
            planner,
            executor,
            engine.cost,
            metrics,
            clock,
            config.emit_interval_ms / 1e3,
            build_colocated(config, engine.identity, metrics.registry),
        )
        self._intake = Intake(config, engine.identity, engine.tokenizer, tracer, SessionFence(clock))
        decode = DecodeHandler(config, engine.identity, self.loop, self._intake, self.blocks.total_blocks)
        draft = DraftHandler(config, engine.identity, self.loop, metrics)
        self.loop.observers.append(decode.update)
        self.server = ServiceServer(
            config.listen,
            SERVICE_NAME,
            reflection=config.reflection,
            tls=tls,
            health_address=config.health_listen,
        )
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(decode, draft), self.server.grpc)
        self._export(metrics, engine.divergence)

    async def prepare(self) -> None:
        """Do beforehand what would stop every thread for a while, once this serves."""
        await self._intake.prepare()

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain: running sequences may end, the rest is handed back."""
        stepping = asyncio.create_task(self.loop.run())
        stopping = asyncio.create_task(stop.wait())
        address = await self.server.start()
        settle_in()
        _log.info("serving", address=address)
        await asyncio.wait({stepping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stepping.done():
            await self.server.set_serving(False)
            await self.loop.drain(self._config.drain_s)
        await self.server.drain(_STOP_GRACE_S)
        stopping.cancel()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        self._intake.close()
        self._thread.shutdown()
        if not stepping.cancelled() and (error := stepping.exception()) is not None:
            raise error

    def _export(self, metrics: VerifierMetrics, divergence: float) -> None:
        watch, watch_total = metrics.watch, metrics.watch_total
        watch("treeserve_verifier_sequences", "Sequences held", lambda: len(self._scheduler))
        watch("treeserve_verifier_kv_free_blocks", "Free KV blocks", lambda: self.blocks.free_blocks)
        watch("treeserve_verifier_kv_cached_blocks", "Free ones with a known prefix", lambda: self.blocks.cached_blocks)
        watch("treeserve_verifier_kv_spilled_blocks", "Blocks in tiers below", lambda: sum(self.blocks.tier_blocks))
        watch("treeserve_verifier_kv_blocks", "All KV blocks", lambda: self.blocks.total_blocks)
        watch("treeserve_verifier_speculators", "Attached speculators", lambda: len(self._desk.speculators))
        watch("treeserve_verifier_logits_divergence", "Batch dependence of logits; 0 is exact", lambda: divergence)
        watch_total("treeserve_verifier_tree_asks", "Trees asked for", lambda: self._desk.asks)
        watch_total("treeserve_verifier_late_trees", "Trees that came too late", lambda: self._desk.late)
        watch_total("treeserve_verifier_kv_restored", "Blocks from tiers", lambda: self.blocks.restored_blocks)
        watch_total("treeserve_verifier_preemptions", "Sequences preempted", lambda: self._scheduler.preemptions)
        watch_total(
            "treeserve_verifier_pauses", "Sequences paused for more urgent ones", lambda: self._scheduler.pauses
        )
        watch("treeserve_verifier_waiting", "Sequences that do not run", lambda: len(self._scheduler.waiting))
        watch(
            "treeserve_verifier_oldest_waiting_seconds",
            "How long the one that has waited longest waits",
            lambda: self._scheduler.oldest_waiting_s,
        )

    def _computed_last(self, sequence: Sequence) -> int:
        """Tokens at the end of a prompt that are computed though their KV is known: speculators want their features."""
        shape, speculators = self._desk.feature_shape, self._desk.speculators
        if shape is None or not sequence.submission.limits.speculates or not any(s.wants_features for s in speculators):
            return 1
        return shape.window_tokens

    def _sequence_ended(self, sequence: Sequence) -> None:
        self._desk.close(sequence)
        self._metrics.count_end(sequence)
        sequence.span.set_attributes(
            {
                "treeserve.output_tokens": sequence.output_len,
                "treeserve.steps": sequence.stats.steps,
                "treeserve.drafted": sequence.stats.drafted,
                "treeserve.accepted": sequence.stats.accepted,
            }
        )
        sequence.span.end()


async def run(config: VerifierConfig, stop: asyncio.Event) -> None:
    """Load the model, serve until `stop` is set, then drain."""
    tracer = setup_tracing("treeserve-verifier", config.otlp_endpoint)
    tls = Tls.of(config.tls)
    engine = await asyncio.to_thread(load_engine, config)
    verifier = Verifier(config, engine, tracer, VerifierMetrics(), tls)
    start_metrics(config.metrics_listen)
    await verifier.prepare()
    await verifier.serve(stop)


def main(argv: SequenceOf[str] | None = None) -> None:
    """Entry point of `python -m treeserve_verifier`."""
    run_service("verifier", VerifierConfig, run, argv)
