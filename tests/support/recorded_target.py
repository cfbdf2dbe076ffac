"""The tiny model as a target whose plain outputs are recorded, with an end of sequence that it happens to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.acceptance.record import PlainOutput, Prompt, Recorder
from treeserve_core.sampling import SamplingParams, StoppingCriteria
from treeserve_engine.accept import SequenceSampler
from treeserve_engine.interface import Model
from treeserve_engine.loading import load_model
from treeserve_text.tokenizer import Tokenizer

MAX_TOKENS = 40
TEXTS = ("the quick brown fox", "one two three four", "def add(a, b):\n", "naïve café")
SSM_FIELDS = {"ssm_dtype": "float32", "ssm_kv_tokens": 2048}


@dataclass(frozen=True)
class RecordedTarget:
    """The model and what tells its tokens apart."""

    model: Model
    folder: Path
    vocab_size: int
    eos: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def load(cls, folder: Path, scratch: Path) -> RecordedTarget:
        tokenizer = Tokenizer.from_folder(folder)
        model = load_model(folder, dtype="float32", device="cpu", threads=1)
        prompts = tuple(tuple(tokenizer.encode(text)) for text in TEXTS)
        endless = cls(model, folder, tokenizer.vocab_size, (), prompts)
        said = endless.record(scratch)
        return replace(endless, eos=(said[0].output_ids[20], said[-1].output_ids[20]))

    def recorder(self, folder: Path) -> Recorder:
        return Recorder(
            lambda: self.model,
            "tiny",
            folder,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos,
            max_tokens=MAX_TOKENS,
        )

    def record(self, folder: Path) -> list[PlainOutput]:
        """Greedy outputs, then sampled ones, of two kinds."""
        return self.recorder(folder).record(
            [
                Prompt(("chat", "code")[i % 2], prompt, temperature, seed=i)
                for temperature in (0.0, 1.0)
                for i, prompt in enumerate(self.prompts)
            ]
        )

    def sampler(self, prompt: Sequence[int], params: SamplingParams) -> SequenceSampler:
        stopping = StoppingCriteria(max_tokens=MAX_TOKENS)
        return SequenceSampler(params, stopping, prompt, eos_token_ids=self.eos, vocab_size=self.vocab_size)
