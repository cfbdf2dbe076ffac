"""Watches the EndpointSlices of a Service through the Kubernetes API, so that changes are known at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import structlog

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire.backoff import Backoff
from treeserve_wire.peer_source import peer_address

if TYPE_CHECKING:  # the package is heavy: only who watches imports it
    from kubernetes.client import DiscoveryV1Api, V1EndpointSlice

KUBERNETES_SCHEME = "kubernetes://"
_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_FORM = re.compile(rf"kubernetes://(?P<namespace>{_LABEL})/(?P<service>{_LABEL}):(?P<port>[a-z0-9-]{{1,15}})")
_MAX_PORT = 65535

# The server ends a watch after _WATCH_S, and it goes on with another one. A connection that is silent for longer than
# that is dead.
_WATCH_S = 30
_SLACK_S = 10
_CONNECT_S = 5
# A watch that ends sooner, and brought nothing, does not work.
_SHORTEST_S = 1.0
_BACKOFF = Backoff(first_s=0.1, longest_s=5.0)

_log = structlog.get_logger(__name__)

_Slices = dict[str, "V1EndpointSlice"]
_Tell = Callable[[tuple[str, ...]], None]


class EndpointWatch:
    """The peers behind "kubernetes://namespace/service:port": all addresses of the Service's ready endpoints.

    The port is the pods', by number or by the name that the Service gives it. Whatever fails, the last peers stay, and
    the slices are listed again after pauses that grow.

    Raises:
        InvalidArgumentError: for another form, or without a service account's token or a kubeconfig.
    """

    def __init__(self, address: str) -> None:
        form = _FORM.fullmatch(address)
        if form is None or (form["port"].isdigit() and not 0 < int(form["port"]) <= _MAX_PORT):
            raise InvalidArgumentError("verifiers", f"{address!r} is not {KUBERNETES_SCHEME}NAMESPACE/SERVICE:PORT")
        self._address = address
        self._namespace = form["namespace"]
        self._service = form["service"]
        self._port = form["port"]
        self._api = _discovery_api()

    async def found(self) -> AsyncIterator[tuple[str, ...]]:
        """The peers after every list and every change, sorted.

        They come from a thread that no event loop and no process waits for at its end.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        stopped = threading.Event()

        def tell(peers: tuple[str, ...]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have closed meanwhile
                loop.call_soon_threadsafe(found.put_nowait, peers)

        threading.Thread(target=self._follow, args=(tell, stopped), name="endpoint-watch", daemon=True).start()
        try:
            while True:
                yield await found.get()
        finally:
            stopped.set()

    def _follow(self, tell: _Tell, stopped: threading.Event) -> None:
        """List and watch until `stopped` is set."""
        failures, rng = 0, random.Random()
        while not stopped.is_set():
            began = time.monotonic()
            try:
                slices, version = self._list()
                tell(self._peers(slices))
                while not stopped.is_set():
                    version = self._watch(slices, version, tell)
            except Exception as error:  # of many kinds, and the next list may work
                if stopped.is_set():
                    return
                failures = 1 if time.monotonic() - began > _BACKOFF.longest_s else failures + 1
                _log.warning("service not watched", address=self._address, error=self._explained(error))
                stopped.wait(_BACKOFF.wait_s(failures, rng))

    def _list(self) -> tuple[_Slices, str]:
        """The slices by name, and the version of this state."""
        listed = self._api.list_namespaced_endpoint_slice(**self._selection(), _request_timeout=(_CONNECT_S, _SLACK_S))
        _log.info("watching service", address=self._address, slices=len(listed.items))
        return {each.metadata.name: each for each in listed.items}, listed.metadata.resource_version

    def _watch(self, slices: _Slices, version: str, tell: _Tell) -> str:
        """Change `slices` as the server says, until it ends the watch; returns the version of the state then."""
        from kubernetes.watch import Watch

        began, changes, watch = time.monotonic(), 0, Watch()
        events = watch.stream(
            self._api.list_namespaced_endpoint_slice,
            **self._selection(),
            resource_version=version,
            allow_watch_bookmarks=True,  # else a version that nothing changes after would become too old
            timeout_seconds=_WATCH_S,
            _request_timeout=(_CONNECT_S, _WATCH_S + _SLACK_S),
        )
        for event in events:
            changes += 1
            if event["type"] == "BOOKMARK":
                continue
            if event["type"] == "DELETED":
                slices.pop(event["object"].metadata.name, None)
            else:
                slices[event["object"].metadata.name] = event["object"]
            tell(self._peers(slices))
        if not changes and time.monotonic() - began < _SHORTEST_S:
            raise ConnectionError("the watch ended at once")
        return str(watch.resource_version)

    def _selection(self) -> dict[str, Any]:
        return {"namespace": self._namespace, "label_selector": f"kubernetes.io/service-name={self._service}"}

    def _peers(self, slices: _Slices) -> tuple[str, ...]:
        found: set[str] = set()
        for each in slices.values():
            ports = self._ports(each)
            for endpoint in each.endpoints or ():
                if endpoint.conditions is None or endpoint.conditions.ready is not False:
                    found |= {peer_address(ip, port) for ip in endpoint.addresses for port in ports}
        return tuple(sorted(found))

    def _ports(self, endpoint_slice: V1EndpointSlice) -> list[int]:
        if self._port.isdigit():
            return [int(self._port)]
        return [p.port for p in endpoint_slice.ports or () if p.name == self._port and p.port is not None]

    def _explained(self, error: Exception) -> str:
        from kubernetes.client import ApiException

        if not isinstance(error, ApiException):
            return str(error) or repr(error)
        if error.status == 403:
            return f"403: get, list and watch of endpointslices (discovery.k8s.io) in {self._namespace} must be allowed"
        return f"{error.status} {error.reason}"


def _discovery_api() -> DiscoveryV1Api:
    """The API of the cluster that this pod runs in or, outside one, that of the kubeconfig.

    Raises:
        InvalidArgumentError: if there is neither.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(configuration)  # follows the token, which is renewed every hour
    except config.ConfigException as not_in_a_pod:
        try:
            config.load_kube_config(client_configuration=configuration)
        except Exception as error:  # of many kinds
            reason = f"needs a pod with a service account's token ({not_in_a_pod}) or a kubeconfig ({error})"
            raise InvalidArgumentError("verifiers", f"{KUBERNETES_SCHEME} {reason}") from error
    configuration.retries = 0  # those are for `EndpointWatch`
    return client.DiscoveryV1Api(client.ApiClient(configuration))
