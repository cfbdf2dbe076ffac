"""The `treeserve` command: what its commands are. Each is in a file of its own."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer

from treeserve_cli import corpus, keys, simulate
from treeserve_cli.explain import explain
from treeserve_cli.generate import generate
from treeserve_cli.models import models
from treeserve_cli.train import train
from treeserve_cli.up import demo, up

app = typer.Typer(
    name="treeserve",
    help="Tree-speculative LLM serving: identical tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Options of a cluster are the fields of ClusterConfig, those of a training the fields of TrainConfig; their loader
# parses them and prints their help.
_CONFIGURED_COMMAND: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}

for configured in (up, demo, train):
    app.command(**_CONFIGURED_COMMAND)(configured)
for command in (generate, explain, models):
    app.command()(command)
for group, name in ((corpus.app, "corpus"), (simulate.app, "simulate"), (keys.app, "keys")):
    app.add_typer(group, name=name)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"treeserve {version('treeserve')}")
        raise typer.Exit


@app.callback()
def _treeserve(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What is said before a command."""
