"""`treeserve train`: reads the command's options and hands them to the training package, which is loaded only then."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import typer

from treeserve_cli.layout import default_model
from treeserve_core.errors import TreeserveError
from treeserve_wire.config import ConfigError, load_config

_PREFIX = "TREESERVE_TRAIN_"
STOPPED = 3  # exit status of a run that was stopped and can be gone on with


def train(context: typer.Context) -> None:
    """Train drafters for a model; `treeserve train --help` lists the options.

    Ctrl-C or SIGTERM stops it with a checkpoint (exit status 3); the same command goes on from there.
    """
    from treeserve_training.config import TrainConfig  # torch comes with what follows, rich and matplotlib too

    try:
        config = load_config(TrainConfig, context.args, _environment(), _PREFIX, prog="treeserve train")
    except ConfigError as error:
        raise _failed(error, 2) from None

    from rich.console import Console

    from treeserve_training.train import train as run

    try:
        config = replace(config, model=config.model or default_model(config.cache_dir))
        finished = run(config, Console())
    except (TreeserveError, OSError) as error:
        raise _failed(error, 1) from None
    if not finished:
        raise typer.Exit(STOPPED)


def _environment() -> dict[str, str]:
    environ = dict(os.environ)
    if "TREESERVE_CACHE" in environ:
        environ.setdefault(f"{_PREFIX}CACHE_DIR", environ["TREESERVE_CACHE"])
    return environ


def _failed(message: object, code: int) -> typer.Exit:
    print(f"treeserve: {message}", file=sys.stderr, flush=True)
    return typer.Exit(code)
