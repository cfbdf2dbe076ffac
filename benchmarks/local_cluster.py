"""A local cluster for the length of a `with` block, configured by the options of `treeserve up`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.peers.peer import PeerError, Settings
from benchmarks.peers.process import ROOT
from benchmarks.peers.treeserve import up_arguments
from treeserve_cli.cluster import ClusterError, LocalCluster
from treeserve_cli.layout import ClusterConfig
from treeserve_core.errors import TreeserveError
from treeserve_wire.config import load_config

READY_TIMEOUT_S = 120.0


def cluster_config(settings: Settings, options: Sequence[str]) -> ClusterConfig:
    """The configuration that these options give.

    Args:
        options: `NAME=VALUE` is an option of `treeserve up`, `ROLE.FIELD=VALUE` a setting of a service; later ones win.

    Raises:
        PeerError: for an option that does not exist or a value that cannot work.
    """
    given = dict(option.split("=", 1) for option in (f"ready_timeout_s={READY_TIMEOUT_S:g}", *options))
    options_of_up = [f"{name}={value}" for name, value in given.items() if "." not in name]
    arguments = up_arguments(str(ROOT / settings.cache), settings.kv_tokens, options_of_up)
    # Not as arguments: a service's setting may hold commas.
    service_settings = tuple(f"{name}={value}" for name, value in given.items() if "." in name)
    try:
        return replace(load_config(ClusterConfig, arguments[1:], {}), settings=service_settings)
    except (TreeserveError, SystemExit) as error:
        raise PeerError(f"`treeserve {' '.join(arguments)}` is refused: {error}") from error


@contextmanager
def running(settings: Settings, options: Sequence[str]) -> Iterator[LocalCluster]:
    """A cluster that serves; nothing of it is left behind, whatever happens inside.

    Raises:
        PeerError: if it does not come up; the message has the end of the log of what failed.
    """
    cluster = LocalCluster(cluster_config(settings, options))
    try:
        cluster.start()
    except (ClusterError, TreeserveError, OSError) as error:
        raise PeerError(f"a cluster with {', '.join(options) or 'its defaults'} does not start: {error}") from error
    try:
        yield cluster
    finally:
        cluster.stop()
