"""Sequences for tests of the verifier's logic, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from treeserve_core.sampling import SamplingParams, SequenceLimits, StoppingCriteria
from treeserve_engine.accept import SequenceSampler
from treeserve_verifier.config import VerifierConfig
from treeserve_verifier.sequence import Emission, Sequence, Submission

VOCAB = 100
EOS = 99
_ids = itertools.count(1)


def make_config(**changes: Any) -> VerifierConfig:
    """A small verifier's configuration."""
    defaults: dict[str, Any] = {
        "model_folder": Path("unused"),
        "model_name": "tiny",
        "kv_tokens": 256,
        "block_size": 4,
        "max_sequences": 8,
        "max_context_tokens": 128,
        "max_nodes": 8,
        "step_rows": 64,
        "prefill_rows": 16,
    }
    return VerifierConfig(**{**defaults, **changes})


def make_sequence(
    prompt: SequenceOf[int] = (1, 2, 3),
    max_tokens: int = 32,
    limits: SequenceLimits | None = None,
    emit: Callable[[Emission], None] = lambda emission: None,
    **submitted: Any,
) -> Sequence:
    """A greedy sequence over a vocabulary of 100 tokens; `submitted` are further fields of its submission."""
    submission = Submission(
        request_id="test",
        prompt_token_ids=tuple(prompt),
        generated_token_ids=(),
        sampling=SamplingParams(),
        stopping=StoppingCriteria(max_tokens=max_tokens),
        limits=limits or SequenceLimits(),
        **submitted,
    )
    sampler = SequenceSampler(submission.sampling, submission.stopping, prompt, eos_token_ids=(EOS,), vocab_size=VOCAB)
    return Sequence(next(_ids), submission, emit, sampler, None, list(prompt))
