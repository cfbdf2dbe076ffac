"""A Kubernetes API that knows EndpointSlices only: lists and watches, with what goes wrong there."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


def endpoint(*addresses: str, ready: bool | None = True) -> dict[str, Any]:
    """An endpoint of a slice; `ready` None leaves the condition out."""
    return {"addresses": addresses, "conditions": {} if ready is None else {"ready": ready}}


class FakeKubernetes:
    """Serves on loopback between `start` and `stop`, on the same port each time.

    Args:
        context: serves HTTPS with it.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._changed = threading.Condition()
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._version = 100
        self._oldest = 0
        self._server: ThreadingHTTPServer | None = None
        self._open: list[socket.socket] = []
        self.port = 0
        self.status = 200  # of every answer
        self.ends_watches = True  # when they have lasted as long as they were asked for
        self.longest_watch_s = 3600.0
        self.lists: list[str] = []  # resource versions that were asked for, "" for none
        self.watches: list[str] = []
        self.tokens: list[str] = []

    def start(self) -> None:
        """Begin to serve."""
        server = self._server = _Server(("127.0.0.1", self.port), _handler_of(self))
        if self._context is not None:
            server.socket = self._context.wrap_socket(server.socket, server_side=True)
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse and cut every connection."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        self.drop()

    def put(
        self,
        name: str,
        endpoints: Sequence[dict[str, Any]] | None,
        service: str = "verifiers",
        namespace: str = "serving",
        ports: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Make or change a slice. Slices of one name in two namespaces are not distinguished."""
        with self._changed:
            kind = "MODIFIED" if name in self._slices else "ADDED"
            self._slices[name] = {
                "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
                "addressType": "IPv4",
                "endpoints": endpoints,
                "ports": ports,
            }
            self._happened(kind, self._slices[name])

    def delete(self, name: str) -> None:
        """Delete a slice."""
        with self._changed:
            self._happened("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        """Tell the watches of a newer version without a change."""
        with self._changed:
            self._happened("BOOKMARK", {"metadata": {}})

    def forget(self) -> None:
        """Let every version up to now be too old: open watches are told so, later ones refused."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._changed.notify_all()

    def drop(self) -> None:
        """Cut the connections that are open."""
        for connection in self._open:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _happened(self, kind: str, what: dict[str, Any]) -> None:
        self._version += 1
        what = {**what, "metadata": {**what["metadata"], "resourceVersion": str(self._version)}}
        self._events.append((self._version, kind, what))
        self._changed.notify_all()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.tokens.append(handler.headers.get("Authorization", ""))
        watches = query.get("watch") == "true"
        (self.watches if watches else self.lists).append(query.get("resourceVersion", ""))
        if self.status != 200:
            self._send(handler, self.status, {"kind": "Status", "code": self.status, "reason": "Told"})
        elif watches:
            self._open.append(handler.connection)
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            self._stream(handler, url.path, query)
        else:
            with self._changed:
                items = [each for each in self._slices.values() if _asked_for(each, url.path, query)]
                state = {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            self._send(handler, 200, state)

    def _stream(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, str]) -> None:
        known = int(query["resourceVersion"])
        asked_s = float(query["timeoutSeconds"]) if self.ends_watches else 3600.0
        ends = time.monotonic() + min(asked_s, self.longest_watch_s)
        while time.monotonic() < ends:
            with self._changed:
                while self._version == known and time.monotonic() < ends:
                    self._changed.wait(max(ends - time.monotonic(), 0))
                expired = known < self._oldest
                events = [] if expired else [event for event in self._events if event[0] > known]
                known = self._version
            for _, kind, what in events:
                wanted = (
                    query.get("allowWatchBookmarks") == "true" if kind == "BOOKMARK" else _asked_for(what, path, query)
                )
                if wanted:
                    _send_chunk(handler, {"type": kind, "object": what})
            if expired:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                _send_chunk(handler, {"type": "ERROR", "object": gone})
                break
        handler.wfile.write(b"0\r\n\r\n")

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: peers that hang up are what the tests are about."""


def _handler_of(fake: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            fake._answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _asked_for(endpoint_slice: dict[str, Any], path: str, query: dict[str, str]) -> bool:
    metadata = endpoint_slice["metadata"]
    label = f"kubernetes.io/service-name={metadata['labels']['kubernetes.io/service-name']}"
    return path == _PATH.format(metadata["namespace"]) and query.get("labelSelector", label) == label


def _send_chunk(handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    line = json.dumps(event).encode() + b"\n"
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
