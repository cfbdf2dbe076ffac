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
        default=None,
        metadata=option(
            "the target, which is drafted for: a Hugging Face folder or a .gguf file",
            default="the model that `make setup` fetches",
        ),
    )
    model_name: str | None = field(
        default=None,
        metadata=option(
            "the target's name, in drafter.json and in the default folders", default="that of its folder or file"
        ),
    )
    out: Path | None = field(
        default=None,
        metadata=option(
            "folder to write the drafters to; what it holds already is kept, but for what --build makes anew",
            default="drafters/MODEL_NAME",
        ),
    )
    data: Path | None = field(
        default=None,
        metadata=option(
            "training data: a folder that an earlier run filled, or a JSONL file of prompts that the target is to "
            'answer, one {"messages": [...]} or {"prompt": ...} a line',
            default="the target answers prompts of many kinds that are made up",
        ),
    )
    tokens: int = field(
        default=2_500_000,
        metadata=option(
            "generate answers until there are so many tokens of them, those of earlier runs counted; a folder given as "
            "--data is taken as it is"
        ),
    )
    build: tuple[str, ...] = field(
        default=(SSM,),
        metadata=option(
            "what to train, comma-separated: ssm (small draft models), ngram_table (which tokens follow which), head "
            "(drafts from the target's hidden states)"
        ),
    )
    ssms: int = field(
        default=1,
        metadata=option(
            f"number of draft models, 1 to {MOST_SSMS}; several share the training budget of one, and each learns "
            "where those before it are wrong"
        ),
    )
    start: Path | None = field(
        default=None,
        metadata=option(
            "drafter folder whose ssm is trained further; --layers must be as many as it has",
            default="an ssm begins as the target's first layers",
        ),
    )
    layers: int = field(default=2, metadata=option("number of layers of an ssm"))
    vocabulary: int = field(
        default=8192,
        metadata=option(
            "how many tokens an ssm or head can propose, the most frequent in the data; with --start an ssm keeps its "
            "own"
        ),
    )
    epochs: float = field(
        default=4.0,
        metadata=option("passes of an ssm or head over the sequences that are there at the start"),
    )
    sequences: int = field(
        default=0,
        metadata=option(
            "number of sequences (a prompt with its answer) to train on, repeats counted, in place of --epochs; 0 goes "
            "by --epochs"
        ),
    )
    learning_rate: float = field(
        default=2e-3, metadata=option("learning rate of AdamW after the warm-up and before the cool-down")
    )
    sequences_per_step: int = field(default=4, metadata=option("batch size: sequences in a training step"))
    hard_weight: float = field(
        default=0.0,
        metadata=option(
            "what an ssm or head learns, 0 to 1: at 0 the target's distribution, at 1 only the token that the target "
            "chose, between them a mixture"
        ),
    )
    max_context: int = field(
        default=1024,
        metadata=option("longest sequence that is trained on, in tokens; of a longer one the beginning is left out"),
    )
    threads: int = field(default=1, metadata=option("number of CPU threads for generating and training"))
    seed: int = field(
        default=0, metadata=option("seed of what is generated, and of the order in which it is trained on")
    )
    held_out: int = field(
        default=64,
        metadata=option(
            "number of answers, not trained on, on which the drafters are tried at the end; 0 leaves it out"
        ),
    )
    licence: str = field(
        default="Apache-2.0", metadata=option("licence of the drafters, an SPDX identifier, for drafter.json")
    )
    cache_dir: Path = field(default_factory=default_cache_dir, metadata=option("where converted models are kept"))
    work_dir: Path | None = field(
        default=None,
        metadata=option(
            "folder of generated data, checkpoints and the report; a run that was stopped goes on from what is there",
            default="drafting/MODEL_NAME in --cache-dir",
        ),
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
