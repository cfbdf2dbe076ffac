"""`treeserve train`: reads the command's options and hands them to the training, which is loaded only then."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from treeserve_cli.layout import default_cache, default_model
from treeserve_cli.messages import failed
from treeserve_core.errors import TreeserveError
from treeserve_training.config import TrainConfig
from treeserve_wire.config import ConfigError, load_config, option

_PREFIX = "TREESERVE_TRAIN_"
STOPPED = 3  # exit status of a run that was stopped and can be gone on with


@dataclass(frozen=True)
class _Config(TrainConfig):
    """Train drafters for a model: on its own answers, or on its answers to prompts of yours."""

    cache_dir: Path = field(
        default_factory=default_cache, metadata=option("where converted models are kept ($TREESERVE_CACHE)")
    )


def train(context: typer.Context) -> None:
    """Train drafters for a model; `treeserve train --help` lists the options.

    Ctrl-C or SIGTERM stops it with a checkpoint (exit status 3); the same command goes on from there.
    """
    try:
        config = load_config(_Config, context.args, os.environ, _PREFIX, prog="treeserve train")
    except ConfigError as error:
        raise failed(error, 2) from None

    from rich.console import Console

    from treeserve_training.train import train as run  # torch and matplotlib come with it

    try:
        config = replace(config, model=config.model or default_model(config.cache_dir))
        finished = run(config, Console())
    except (TreeserveError, OSError) as error:
        raise failed(error) from None
    if not finished:
        raise typer.Exit(STOPPED)
