"""`treeserve train`: data, drafters and a report for one target model. A run that is stopped goes on where it was."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from treeserve_core.errors import InvalidArgumentError
from treeserve_engine.checkpoint import prepare_checkpoint
from treeserve_speculator.config import SpeculatorConfig
from treeserve_speculator.drafter_files import DrafterTarget, check_for_writing
from treeserve_speculator.sources.base import DraftSource, FeatureDraftSource, SourceSettings
from treeserve_speculator.sources.registry import build_sources
from treeserve_text.tokenizer import Tokenizer
from treeserve_training.agreement import measure_agreement
from treeserve_training.config import HEAD, NGRAM_TABLE, SSM, TrainConfig
from treeserve_training.display import Display
from treeserve_training.generate import generate_data
from treeserve_training.head_export import export_head
from treeserve_training.head_training import train_head
from treeserve_training.held_out import Together, follow
from treeserve_training.memory import keep_freed_memory
from treeserve_training.ngram_export import export_ngram_table
from treeserve_training.output_folder import check_folder_writable
from treeserve_training.records import read_about, read_counts, read_samples
from treeserve_training.report import Report
from treeserve_training.ssm_export import drafter_target, export_ssm
from treeserve_training.ssm_training import SsmTrainer, Supervision, TrainedSsm
from treeserve_training.target_features import FedWithFeatures, TargetFeatures
from treeserve_training.training_loop import Progress, Recipe
from treeserve_training.training_set import ContextCut

_BUDGETS = (4, 8, 24)  # nodes of the trees that the report follows
_HELD_OUT_SEQUENCES = 200  # whose rows are compared without trees


def train(config: TrainConfig, console: Console) -> bool:
    """Do all that is asked for; whether it was finished, or stopped by SIGTERM or SIGINT before.

    Raises:
        InvalidArgumentError: if the model or the data cannot be used, or a folder cannot be written: before anything
            is made.
    """
    check_folder_writable(config.out_folder, "out")
    check_folder_writable(config.work_folder, "work_dir")
    keep_freed_memory()
    torch.set_num_threads(config.threads)
    with Display(console) as display:
        model_folder = prepare_checkpoint(config.target, config.cache_dir, display.tell)
        target = drafter_target(model_folder, config.name)
        check_for_writing(config.out_folder, target)
        data = _data(config, model_folder, display.tell)
        stop = _StopSignals()
        run = _Run(config, model_folder, target, data, display, stop)
        return run.build()


class _StopSignals:
    """Whether SIGTERM or SIGINT came. A second one ends the process at once."""

    def __init__(self) -> None:
        self.came = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.came = True
        signal.signal(number, signal.SIG_DFL)


class _Run:
    """One run: what is built of the data, and the report on it."""

    def __init__(
        self,
        config: TrainConfig,
        model_folder: Path,
        target: DrafterTarget,
        data: Path,
        display: Display,
        stop: _StopSignals,
    ) -> None:
        self._config = config
        self._model_folder = model_folder
        self._target = target
        self._data = data
        self._display = display
        self._stop = stop
        self._report = Report(_plain(asdict(config)), read_counts(data))

    def build(self) -> bool:
        """Build every part; false if stopped before the end."""
        sources: list[str] = []
        if SSM in self._config.build:
            trained = self._build_ssms()
            if trained is None:
                return self._stopped()
            sources += [drafter.source for drafter in trained]
        if HEAD in self._config.build:
            if not self._build_head():
                return self._stopped()
            sources.append(HEAD)
        if NGRAM_TABLE in self._config.build:
            self._build_ngram_table()
            sources.append(NGRAM_TABLE)
        self._follow(sources)
        for line in (*self._report.lines(), *map(str, self._report.write(self._config.work_folder))):
            self._display.tell(line)
        return True

    def _stopped(self) -> bool:
        self._display.tell("stopped; the same command goes on from here")
        return False

    def _build_head(self) -> bool:
        config = self._config
        watch = Supervision(self._display.tell, self._display.on_step, self._display.on_look, lambda: self._stop.came)
        trained = train_head(config, self._model_folder, self._data, watch)
        if trained is None:
            return False
        export_head(
            trained.model,
            trained.vocabulary,
            folder=config.out_folder,
            target=self._target,
            licence=config.licence,
            recipe=self._common_recipe(trained.recipe, trained.progress)
            | {"initialised_from": "a layer of the target's", "features_after_layers": trained.model.shape.layers},
        )
        return True

    def _build_ssms(self) -> list[TrainedSsm] | None:
        config = self._config
        cut = ContextCut(common_prefix(self._model_folder), config.max_context)
        watch = Supervision(self._display.tell, self._display.on_step, self._display.on_look, lambda: self._stop.came)
        trainer = SsmTrainer(config, self._model_folder, self._data, cut, watch)
        trained = trainer.run()
        if trained is None:
            return None
        held_out = trainer.sequences("validation")[:_HELD_OUT_SEQUENCES]
        for drafter in trained:
            self._report.curves[drafter.source] = drafter.curve
            self._report.agreement[drafter.source] = measure_agreement(drafter.model, held_out, config.hard_weight)
            export_ssm(
                drafter.model,
                trainer.vocabulary,
                cut_prefix=cut.prefix,
                source=drafter.source,
                folder=config.out_folder,
                target=self._target,
                licence=config.licence,
                recipe=self._recipe(drafter),
            )
        return trained

    def _build_ngram_table(self) -> None:
        export_ngram_table(
            self._data,
            folder=self._config.out_folder,
            target=self._target,
            licence=self._config.licence,
            progress=self._display.tell,
        )

    def _recipe(self, drafter: TrainedSsm) -> dict[str, Any]:
        config = self._config
        origin = "the target's first layers" if config.start is None else f"drafters/{config.start.name}"
        return self._common_recipe(drafter.recipe, drafter.progress) | {
            "initialised_from": origin,
            "boost_tuned_among": config.ssms,
            "layers": config.layers,
            "agreement": asdict(self._report.agreement[drafter.source]),
        }

    def _common_recipe(self, recipe: Recipe, progress: Progress) -> dict[str, Any]:
        config = self._config
        return {
            "command": "treeserve train",
            "data": {**read_about(self._data), **self._report.data},
            "hard_weight": config.hard_weight,
            "max_context": config.max_context,
            "sequences_per_step": config.sequences_per_step,
            "seed": config.seed,
            "optimiser": {**asdict(recipe), "name": "AdamW"},
            "trained_on": {"sequences": progress.sequences, "outputs": progress.outputs},
        }

    def _follow(self, names: Sequence[str]) -> None:
        """Draft along held-out outputs with each source, and with all of them."""
        if not self._config.held_out or not names:
            return
        greedy = (sample for sample in read_samples(self._data, split="validation") if sample.temperature == 0.0)
        samples = list(islice(greedy, self._config.held_out))
        longest = max((len(sample.prompt_ids) + len(sample.output_ids) for sample in samples), default=1)
        built = [self._fed(source, longest) for source in self._sources(names)]
        sources: list[DraftSource] = [*built, Together(built)] if len(built) > 1 else built
        for source in sources:
            self._report.trees[source.name] = {budget: follow(source, samples, budget) for budget in _BUDGETS}

    def _fed(self, source: DraftSource, longest: int) -> DraftSource:
        """A source that gets what it needs of the target along recordings of at most so many tokens."""
        if not isinstance(source, FeatureDraftSource):
            return source
        config = self._config
        features = TargetFeatures(self._model_folder, config.cache_dir, threads=config.threads, max_tokens=longest)
        return FedWithFeatures(source, features)

    def _sources(self, names: Sequence[str]) -> list[DraftSource]:
        config, target = self._config, self._target
        settings = SpeculatorConfig(
            self._model_folder,
            config.name,
            sources=tuple(names),
            drafter_folder=config.out_folder,
            threads=config.threads,
            cache_dir=config.cache_dir,
        )
        eos = frozenset(Tokenizer.from_folder(self._model_folder).eos_token_ids)
        return list(build_sources(SourceSettings(settings, target.vocab_size, target.tokenizer_hash, eos)))


def common_prefix(model_folder: Path) -> tuple[int, ...]:
    """The tokens that every conversation begins with, whatever the user says; none without a chat template."""
    tokenizer = Tokenizer.from_folder(model_folder)
    try:
        first, second = (tokenizer.render_chat([{"role": "user", "content": text}]) for text in ("1", "a"))
    except InvalidArgumentError:
        return ()
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return tuple(token_id for token_id, _ in same)


def _data(config: TrainConfig, model_folder: Path, tell: Callable[[str], None]) -> Path:
    """The data folder, filled as far as is asked for."""
    if config.data is not None and config.data.is_dir():
        folder, prompts = config.data, None
    elif config.data is not None:
        digest = hashlib.sha256(config.data.read_bytes()).hexdigest()[:16]
        folder, prompts = config.work_folder / f"data-{digest}", config.data
    else:
        folder, prompts = config.work_folder / "data", None
    have = read_counts(folder).get("tokens", 0) if folder.is_dir() else 0
    if have < config.tokens and (config.data is None or prompts is not None):
        check_folder_writable(folder, "work_dir")
        generate_data(
            model_folder,
            folder,
            tokens=config.tokens,
            threads=config.threads,
            cache_dir=config.cache_dir,
            seed=config.seed,
            prompts_jsonl=prompts,
            progress=tell,
        )
    about = read_about(folder)
    if about["tokenizer"] != Tokenizer.from_folder(model_folder).hash:
        raise InvalidArgumentError("data", f"{folder} was made with another tokenizer than the model's")
    return folder


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
