"""What `treeserve train` is asked to do, fully resolved before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.made_once import default_cache_dir
from treeserve_wire.config import check_at_least, option

SSM, NGRAM_TABLE, HEAD = "ssm", "ngram_table", "head"
PARTS = (SSM, NGRAM_TABLE, HEAD)
MOST_SSMS = 5


@dataclass(frozen=True)
class TrainConfig:
    """Train drafters for a model: on its own answers, or on its answers to prompts of yours.

    Raises:
        InvalidArgumentError: for a value that cannot work.
    """

    model: Path | None = field(
        default=None, metadata=option("the target: Hugging Face folder or .gguf file; without it the default model")
    )
    model_name: str | None = field(default=None, metadata=option("its name in drafter.json; without it the file's"))
    out: Path | None = field(default=None, metadata=option("drafter folder to write; without it drafters/<name>"))
    data: Path | None = field(
        default=None,
        metadata=option(
            "training data: a folder that an earlier run filled, or a JSONL file of your prompts, one "
            '{"messages": [...]} or {"prompt": ...} a line; without it prompts of many kinds are made up'
        ),
    )
    tokens: int = field(default=2_500_000, metadata=option("output tokens to generate where the data folder has fewer"))
    build: tuple[str, ...] = field(default=(SSM,), metadata=option(f"what to train: {', '.join(PARTS)}"))
    ssms: int = field(default=1, metadata=option("draft models: 2 to 5 are boost-tuned and share the budget of one"))
    start: Path | None = field(
        default=None, metadata=option("drafter folder whose ssm is tuned further; without it the target's first layers")
    )
    layers: int = field(default=2, metadata=option("layers of a draft model"))
    vocabulary: int = field(default=8192, metadata=option("most frequent tokens that a draft model can say"))
    epochs: float = field(default=4.0, metadata=option("passes over the data that is there at the start"))
    sequences: int = field(default=0, metadata=option("in place of epochs: sequences to train on, repeats counted"))
    learning_rate: float = field(default=2e-3, metadata=option("after the warm-up"))
    sequences_per_step: int = field(default=4, metadata=option("sequences of a training step"))
    hard_weight: float = field(
        default=0.0,
        metadata=option("how much of the target's distribution is replaced by the token it emitted, 0 to 1"),
    )
    max_context: int = field(default=1024, metadata=option("tokens of a sequence that are trained on, the last ones"))
    threads: int = field(default=1, metadata=option("CPU threads"))
    seed: int = field(default=0, metadata=option("of the data and of their order"))
    held_out: int = field(default=64, metadata=option("held-out answers that the report follows"))
    licence: str = field(default="Apache-2.0", metadata=option("SPDX identifier for drafter.json"))
    cache_dir: Path = field(default_factory=default_cache_dir, metadata=option("where converted models are kept"))
    work_dir: Path | None = field(
        default=None, metadata=option("data and checkpoints; without it drafting/<name> in the cache")
    )

    def __post_init__(self) -> None:
        unknown = set(self.build) - set(PARTS)
        if unknown or not self.build:
            raise InvalidArgumentError("build", f"name one or more of {', '.join(PARTS)}, not {sorted(unknown)}")
        check_at_least(
            self, 1, "tokens", "ssms", "layers", "vocabulary", "sequences_per_step", "max_context", "threads"
        )
        check_at_least(self, 0, "sequences", "held_out", "seed")
        if self.ssms > MOST_SSMS:
            raise InvalidArgumentError("ssms", f"at most {MOST_SSMS}")
        if not 0.0 <= self.hard_weight <= 1.0:
            raise InvalidArgumentError("hard_weight", "is outside [0, 1]")
        if self.epochs <= 0.0 or self.learning_rate <= 0.0:
            raise InvalidArgumentError("epochs", "epochs and learning_rate are above 0")

    @property
    def target(self) -> Path:
        """The target model's folder or file."""
        if self.model is None:
            raise InvalidArgumentError("model", "name the target")
        return self.model

    @property
    def name(self) -> str:
        """The target's name."""
        if self.model_name is not None:
            return self.model_name
        source = self.target.absolute()
        return source.stem if source.suffix.lower() == ".gguf" else source.name

    @property
    def out_folder(self) -> Path:
        """Where the drafters go."""
        return Path("drafters") / self.name if self.out is None else self.out

    @property
    def work_folder(self) -> Path:
        """Where data and checkpoints go."""
        return self.cache_dir / "drafting" / self.name if self.work_dir is None else self.work_dir
