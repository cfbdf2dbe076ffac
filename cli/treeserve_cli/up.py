"""`treeserve up` and `treeserve demo`: a cluster on this machine until a signal, or until the demonstration is over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import typer
from rich.console import Console

from treeserve_cli.access import API_KEY_VARIABLE
from treeserve_cli.cluster import ClusterError, LocalCluster
from treeserve_cli.demo import DemoConfig, run_demo
from treeserve_cli.layout import ClusterConfig
from treeserve_cli.messages import failed, tell
from treeserve_client import TreeserveClientError
from treeserve_core.errors import TreeserveError
from treeserve_wire.config import ConfigError, load_config

Config = TypeVar("Config", bound=ClusterConfig)

# Not the services' prefix: their variables are inherited by the processes that `up` starts.
_UP_PREFIX = "TREESERVE_UP_"
_LOOK_S = 0.2


def up(context: typer.Context) -> None:
    """Serve a model on this machine until Ctrl-C; `treeserve up --help` lists the options.

    Prints one line `ready grpc=HOST:PORT http=HOST:PORT` on standard output once it serves.
    """
    config = _cluster_config(ClusterConfig, context.args, "treeserve up")
    _interrupt_on_signals()
    try:
        with LocalCluster(config, report=tell) as cluster:
            print(f"ready grpc={cluster.grpc_address} http={cluster.http_address}", flush=True)
            _until_interrupted()
    except KeyboardInterrupt:
        return  # a second one, while stopping, ends this process and its children at once
    except (ClusterError, TreeserveError, OSError) as error:
        raise failed(error) from None


def demo(context: typer.Context) -> None:
    """Start a cluster, stream an answer, and measure speculation against plain decoding. Options are those of `up`."""
    started_at = time.monotonic()
    config = _cluster_config(DemoConfig, context.args, "treeserve demo")
    _interrupt_on_signals()
    try:
        with LocalCluster(config, report=tell) as cluster, cluster.client() as client:
            same = run_demo(client, started_at, Console())
    except KeyboardInterrupt:
        return
    except (ClusterError, TreeserveError, TreeserveClientError, OSError) as error:
        raise failed(error) from None
    if not same:
        raise typer.Exit(1)


def _interrupt_on_signals() -> None:
    """Let SIGTERM raise KeyboardInterrupt, and SIGINT too: a shell's background jobs start with it ignored."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.default_int_handler)


def _until_interrupted() -> NoReturn:
    """Do nothing until a signal raises KeyboardInterrupt.

    One that another thread took, or that came just before a wait began, ends no wait of this one; so none is long.
    """
    while True:
        time.sleep(_LOOK_S)


def _cluster_config(cls: type[Config], arguments: Sequence[str], prog: str) -> Config:
    try:
        return load_config(cls, arguments, _up_environment(), _UP_PREFIX, prog=prog)
    except ConfigError as error:
        raise failed(error, code=2) from None


def _up_environment() -> dict[str, str]:
    environ = dict(os.environ)
    if API_KEY_VARIABLE in environ:
        environ.setdefault(f"{_UP_PREFIX}API_KEY", environ[API_KEY_VARIABLE])
    return environ
