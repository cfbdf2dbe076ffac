"""Checks submissions against this verifier's limits and turns them into sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from opentelemetry import trace

from treeserve_core.errors import InvalidArgumentError
from treeserve_core.grammar import Grammar
from treeserve_core.identity import MAX_SESSION_CHARS, ModelIdentity, check_tenant
from treeserve_core.outcome import FinishReason, SpeculationStats
from treeserve_core.sampling import check_combination, check_token_ids
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.constraint import Constraint
from treeserve_text.assembler import TextAssembler
from treeserve_text.tokenizer import Tokenizer
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.grammars import Grammars
from treeserve_verifier.sequence import Emission, Sequence, Submission
from treeserve_verifier.session_fence import SessionFence
from treeserve_wire.telemetry import context_from


class CompleteError(Exception):
    """The tokens of a submission are a whole text of its grammar, after which nothing can follow.

    Who ran it before did not get to say so, and nobody else can tell.
    """

    def __init__(self, finish_reason: FinishReason) -> None:
        super().__init__(finish_reason.name)
        self.finish_reason = finish_reason


class Intake:
    """Builds sequences. The router checked the request already; this side trusts nothing it did not check itself.

    Args:
        fence: refuses turns of a session that come too late; None lets all pass.
    """

    def __init__(
        self,
        config: VerifierConfig,
        identity: ModelIdentity,
        tokenizer: Tokenizer,
        tracer: trace.Tracer,
        fence: SessionFence | None = None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._tokenizer = tokenizer
        self._tracer = tracer
        self._fence = fence
        self._seq_ids = itertools.count(1)
        self._grammars = Grammars(tokenizer)

    async def prepare(self) -> None:
        """Do what the first grammar would wait for."""
        await self._grammars.prepare()

    async def constraint(self, grammar: Grammar) -> Constraint:
        """What a grammar allows at the beginning of an output. Compiles it beside the event loop and the steps.

        Raises:
            InvalidArgumentError: if it has no meaning or allows no text.
            OverloadedError: if too many wait to be compiled.
        """
        return await self._grammars.matcher(grammar)

    def close(self) -> None:
        """Nothing more is taken in."""
        self._grammars.close()

    def accept(
        self, submission: Submission, emit: Callable[[Emission], None], constraint: Constraint | None = None
    ) -> Sequence:
        """A sequence that is ready to wait for its first step.

        Args:
            constraint: what its grammar allows at the beginning of the output, if it has one.

        Raises:
            InvalidArgumentError: if the submission does not fit the model or this verifier's context window.
            StaleEpochError: if a newer turn of its session was seen.
            CompleteError: if its grammar has ended already.
        """
        self.check(submission)
        sampler = self._sampler(submission, constraint)
        watch = None
        if submission.stopping.stop_strings:
            watch = TextAssembler(self._tokenizer, submission.stopping.stop_strings)
            watch.push(list(submission.generated_token_ids))
            if watch.stopped is not None:
                raise InvalidArgumentError("generated_token_ids", "already contain a stop string")
        if self._fence is not None:
            self._fence.check(submission.tenant, submission.session_id, submission.session_epoch)
        span = self._tracer.start_span(
            "treeserve.verify",
            context_from(submission.traceparent),
            attributes={
                "treeserve.request_id": submission.request_id,
                "treeserve.prompt_tokens": len(submission.prompt_token_ids),
                "treeserve.replayed_tokens": len(submission.generated_token_ids),
                "treeserve.acceptance": submission.limits.acceptance.rule.label,
            },
        )
        tokens = [*submission.prompt_token_ids, *submission.generated_token_ids]
        stats = SpeculationStats(acceptance=submission.limits.acceptance.rule)
        return Sequence(next(self._seq_ids), submission, emit, sampler, watch, tokens, stats, span=span)

    def _sampler(self, submission: Submission, constraint: Constraint | None) -> SequenceSampler:
        try:
            sampler = SequenceSampler(
                submission.sampling,
                submission.stopping,
                submission.prompt_token_ids,
                generated_token_ids=submission.generated_token_ids,
                eos_token_ids=self._identity.eos_token_ids,
                vocab_size=self._identity.vocab_size,
                constraint=constraint,
            )
        except RuntimeError:  # tokens after the end
            raise InvalidArgumentError("generated_token_ids", "go on after the end of the generation") from None
        if sampler.finish_reason is not None and constraint is not None:
            raise CompleteError(sampler.finish_reason)
        if sampler.finish_reason is not None:
            raise InvalidArgumentError("generated_token_ids", "are a finished generation")
        return sampler

    def check(self, submission: Submission) -> None:
        """Check all of a submission but its grammar. Raises InvalidArgumentError."""
        if not submission.prompt_token_ids:
            raise InvalidArgumentError("prompt_token_ids", "is empty")
        for name in ("prompt_token_ids", "generated_token_ids"):
            check_token_ids(name, getattr(submission, name), self._identity.vocab_size)
        check_tenant(submission.tenant)
        if len(submission.session_id) > MAX_SESSION_CHARS:
            raise InvalidArgumentError("session_id", f"has more than {MAX_SESSION_CHARS} characters")
        if not (math.isfinite(submission.waited_ms) and submission.waited_ms >= 0):
            raise InvalidArgumentError("waited_ms", "must be a number of milliseconds")
        submission.sampling.check_vocab(self._identity.vocab_size)
        submission.stopping.check_vocab(self._identity.vocab_size)
        check_combination(submission.sampling, submission.limits)
        total = len(submission.prompt_token_ids) + submission.stopping.max_tokens
        if total > self._config.max_context_tokens:
            raise InvalidArgumentError(
                "stopping.max_tokens",
                f"prompt and max_tokens make {total} tokens; the context window has {self._config.max_context_tokens}",
            )
