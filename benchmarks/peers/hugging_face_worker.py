"""Runs transformers' `generate` for the benchmark: `python -m benchmarks.peers.hugging_face_worker FOLDER THREADS`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.peers.peer import Reply
from benchmarks.peers.tasks import Request
from benchmarks.peers.worker import serve

_LOOKUP_TOKENS = 10  # transformers' documentation uses ten
_PAD = 0


class _StepClock(StoppingCriteria):
    """Never stops; notes when the first step ended and how many there were."""

    def __init__(self) -> None:
        self.first = 0.0
        self.steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        self.first = self.first or time.monotonic()
        self.steps += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Generator:
    def __init__(self, folder: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None  # every answer takes its full length
        self._model.generation_config.pad_token_id = _PAD

    def generate(self, system: str, requests: list[Request], concurrency: int) -> list[Reply]:
        extra = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if system == "hf_lookup" else {}
        batches = [requests[i : i + concurrency] for i in range(0, len(requests), concurrency)]
        return [reply for batch in batches for reply in self._batch(batch, extra)]

    def _batch(self, requests: list[Request], extra: dict[str, int]) -> list[Reply]:
        began = time.monotonic()
        width = max(len(r.token_ids) for r in requests)
        ids = torch.tensor([[_PAD] * (width - len(r.token_ids)) + list(r.token_ids) for r in requests])
        mask = torch.tensor([[0] * (width - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests])
        clock = _StepClock()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=requests[0].max_tokens,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
                **extra,
            )
        ended = time.monotonic()
        tokens = [tuple(row) for row in out[:, width:].tolist()]
        return [
            Reply(r.task, began, clock.first, ended, len(t), t, clock.steps)
            for r, t in zip(requests, tokens, strict=True)
        ]


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    serve(_Generator(sys.argv[1]).generate)
