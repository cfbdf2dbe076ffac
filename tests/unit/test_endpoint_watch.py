"""Peers from the EndpointSlices of a Service, watched at a fake Kubernetes API on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from kubernetes.config import incluster_config, kube_config
from structlog.testing import capture_logs
from support.certificates import Authority
from support.fake_kubernetes import FakeKubernetes, endpoint
from support.tokenizer_folders import byte_level_bpe, write_folder
from support.waiting import until

from treeserve_core.errors import InvalidArgumentError
from treeserve_wire import endpoint_watch
from treeserve_wire.backoff import Backoff
from treeserve_wire.discovery import PeerWatch

ADDRESS = "kubernetes://serving/verifiers:50052"
PROMPT_S = 1.0


def kubeconfig_of(api: FakeKubernetes) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "fake", "user": "nobody"}}],
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{api.port}"}}],
            "users": [{"name": "nobody", "user": {}}],
        }
    )


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a kubeconfig is looked for; there is none yet, and this is no pod."""
    file = tmp_path / "kubeconfig"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    monkeypatch.delenv(incluster_config.SERVICE_HOST_ENV_NAME, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return file


@pytest.fixture
def api(kubeconfig: Path) -> Iterator[FakeKubernetes]:
    """A running API that the kubeconfig names."""
    fake = FakeKubernetes()
    fake.start()
    kubeconfig.write_text(kubeconfig_of(fake))
    yield fake
    fake.stop()


class Followed:
    """What a `PeerWatch` said, and when."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, ...]] = []
        self._changed = asyncio.Event()

    def update(self, peers: tuple[str, ...]) -> None:
        self.updates.append(peers)
        self._changed.set()

    async def until(self, *peers: str, within_s: float = 5.0) -> None:
        """Wait for these peers."""
        try:
            async with asyncio.timeout(within_s):
                while not self.updates or self.updates[-1] != peers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pytest.fail(f"not {peers} within {within_s} s, but {self.updates}")


@contextlib.asynccontextmanager
async def following(*addresses: str) -> AsyncIterator[Followed]:
    followed = Followed()
    task = asyncio.create_task(PeerWatch(addresses or [ADDRESS]).run(followed.update))
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.wait([task])


# --- Which endpoints are peers


async def test_all_slices_of_the_service_count_and_nothing_else(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.2"), endpoint("10.0.0.1", ready=None), endpoint("10.0.0.9", ready=False)])
    api.put("b", [endpoint("fd00::1"), endpoint("10.0.0.2"), {"addresses": ["10.0.0.3"]}])
    api.put("c", None)  # a slice without endpoints has null for a list
    api.put("other-service", [endpoint("10.0.1.1")], service="routers")
    api.put("other-namespace", [endpoint("10.0.1.2")], namespace="elsewhere")
    async with following() as followed:
        await followed.until("10.0.0.1:50052", "10.0.0.2:50052", "10.0.0.3:50052", "[fd00::1]:50052")
        api.put("other-service", [endpoint("10.0.1.3")], service="routers")
        api.put("d", [endpoint("10.0.0.4")])
        await followed.until(*[f"10.0.0.{i}:50052" for i in range(1, 5)], "[fd00::1]:50052")
    assert len(followed.updates) == 2


async def test_a_port_may_be_named(api: FakeKubernetes) -> None:
    ports = [{"name": "metrics", "port": 9102}, {"name": "grpc", "port": 50052}]
    api.put("a", [endpoint("10.0.0.1")], ports=ports)
    api.put("b", [endpoint("10.0.0.2")], ports=[{"name": "grpc", "port": 50060}])
    api.put("c", [endpoint("10.0.0.3")], ports=ports[:1])
    api.put("d", [endpoint("10.0.0.4")])
    async with following("kubernetes://serving/verifiers:grpc") as followed:
        await followed.until("10.0.0.1:50052", "10.0.0.2:50060")


async def test_addresses_of_all_kinds_mix_in_their_order(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.1"), endpoint("127.0.0.1")])
    async with following("unix:/tmp/x", ADDRESS, "dns://127.0.0.1:50052", "10.0.0.7:1") as followed:
        await followed.until("unix:/tmp/x", "10.0.0.1:50052", "127.0.0.1:50052", "10.0.0.7:1")
        assert followed.updates[0] == ("unix:/tmp/x", "10.0.0.7:1")  # those need not wait for an API


# --- Changes


async def test_changes_are_known_at_once(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.1")])
    async with following() as followed:
        await followed.until("10.0.0.1:50052")
        await until(lambda: api.watches)
        api.put("a", [endpoint("10.0.0.1"), endpoint("10.0.0.2")])
        await followed.until("10.0.0.1:50052", "10.0.0.2:50052", within_s=PROMPT_S)
        api.put("b", [endpoint("10.0.0.3")])
        await followed.until("10.0.0.1:50052", "10.0.0.2:50052", "10.0.0.3:50052", within_s=PROMPT_S)
        api.put("a", [endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2")])  # it is going away
        await followed.until("10.0.0.2:50052", "10.0.0.3:50052", within_s=PROMPT_S)
        api.delete("a")
        await followed.until("10.0.0.3:50052", within_s=PROMPT_S)
        api.put("b", [])
        await followed.until(within_s=PROMPT_S)
    assert api.lists == [""]
    assert len(api.watches) == 1


async def test_a_watch_that_has_lasted_its_time_goes_on_where_it_was(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_watch, "_WATCH_S", 1)
    api.put("a", [endpoint("10.0.0.1")])
    async with following() as followed:
        await until(lambda: len(api.watches) == 1)
        api.bookmark()
        await until(lambda: len(api.watches) == 2)
        assert int(api.watches[1]) == int(api.watches[0]) + 1  # the bookmark's
        api.put("a", [endpoint("10.0.0.2")])
        await followed.until("10.0.0.2:50052", within_s=PROMPT_S)
    assert api.lists == [""]


async def test_nothing_is_said_after_the_end(api: FakeKubernetes) -> None:
    def watching() -> bool:
        return any(thread.name == "endpoint-watch" for thread in threading.enumerate())

    api.put("a", [endpoint("10.0.0.1")])
    async with following() as followed:
        await followed.until("10.0.0.1:50052")
        await until(lambda: api.watches)
        assert watching()
    api.put("a", [endpoint("10.0.0.2")])
    api.drop()
    await until(lambda: not watching())
    assert followed.updates == [("10.0.0.1:50052",)]


# --- What goes wrong


async def test_a_version_that_is_too_old_is_listed_anew(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.1")])
    api.put("b", [endpoint("10.0.0.2")])
    async with following() as followed:
        await followed.until("10.0.0.1:50052", "10.0.0.2:50052")
        await until(lambda: api.watches)
        api.forget()
        await until(lambda: len(api.watches) == 2)
        assert len(api.lists) == 2
        with api._changed:  # a deletion that no watch hears of
            api.delete("b")
            api.forget()
        await followed.until("10.0.0.1:50052", within_s=PROMPT_S)
        api.put("a", [endpoint("10.0.0.3")])
        await followed.until("10.0.0.3:50052", within_s=PROMPT_S)


async def test_a_dropped_connection_costs_no_peer_and_no_change(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.1")])
    async with following() as followed:
        await followed.until("10.0.0.1:50052")
        await until(lambda: api.watches)
        api.drop()
        await until(lambda: len(api.watches) == 2)
        api.put("a", [endpoint("10.0.0.2")])
        await followed.until("10.0.0.2:50052", within_s=PROMPT_S)
    assert followed.updates == [("10.0.0.1:50052",), ("10.0.0.2:50052",)]


async def test_a_connection_that_died_in_silence_is_noticed(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_watch, "_WATCH_S", 1)
    monkeypatch.setattr(endpoint_watch, "_SLACK_S", 0.2)
    api.ends_watches = False
    with capture_logs() as logs:
        async with following():
            await until(lambda: len(api.lists) == 2)
    assert any("timed out" in log.get("error", "") for log in logs)


async def test_a_list_that_hangs_is_given_up_and_not_repeated_without_a_pause(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_watch, "_SLACK_S", 0.2)
    monkeypatch.setattr(endpoint_watch, "_BACKOFF", Backoff(5.0, 5.0))
    with capture_logs() as logs, api._changed:  # held, so that no list is answered
        async with following():
            await until(lambda: any("timed out" in log.get("error", "") for log in logs))
    assert api.lists == [""]


async def test_the_last_peers_stay_while_the_api_is_down(api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_watch, "_BACKOFF", Backoff(0.05, 0.2))
    api.put("a", [endpoint("10.0.0.1")])
    async with following() as followed:
        await followed.until("10.0.0.1:50052")
        api.stop()
        await asyncio.sleep(0.5)
        assert followed.updates == [("10.0.0.1:50052",)]
        api.put("a", [endpoint("10.0.0.2")])
        api.start()
        await followed.until("10.0.0.2:50052")


async def test_an_api_that_is_down_at_first_is_waited_for(api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_watch, "_BACKOFF", Backoff(0.05, 0.2))
    api.stop()
    api.put("a", [endpoint("10.0.0.1")])
    with capture_logs() as logs:
        async with following() as followed:
            await until(lambda: sum(log["event"] == "service not watched" for log in logs) > 1)
            assert not followed.updates
            api.start()
            await followed.until("10.0.0.1:50052")


async def test_a_missing_permission_is_named(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.1")])
    api.status = 403
    with capture_logs() as logs:
        async with following() as followed:
            await until(lambda: any(log["event"] == "service not watched" for log in logs))
            api.status = 200
            await followed.until("10.0.0.1:50052")
    error = next(log["error"] for log in logs if log["event"] == "service not watched")
    for part in ("403", "get", "list", "watch", "endpointslices", "discovery.k8s.io", "serving"):
        assert part in error


async def test_pauses_grow_while_watches_end_at_once(api: FakeKubernetes) -> None:
    api.put("a", [endpoint("10.0.0.1")])
    api.longest_watch_s = 0.0
    async with following() as followed:
        await followed.until("10.0.0.1:50052")
        await asyncio.sleep(1.5)
    assert 2 <= len(api.lists) <= 6  # pauses of 0.05 s to 0.1 s, then twice that, and so on
    assert len(api.watches) <= len(api.lists)


# --- The process around it

_HUNG = """
import asyncio, sys, time
from treeserve_wire.discovery import PeerWatch

async def run():
    beats = 0
    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1
    watch = PeerWatch([sys.argv[1]])
    tasks = [asyncio.create_task(beat()), asyncio.create_task(watch.run(print))]
    await asyncio.sleep(0.5)
    assert beats > 10, beats
    print("leaving", flush=True)

asyncio.run(run())
"""


def test_neither_the_event_loop_nor_the_end_of_the_process_waits_for_an_api_that_hangs(
    api: FakeKubernetes, kubeconfig: Path
) -> None:
    api.put("a", [endpoint("10.0.0.1")])
    environ = os.environ | {"KUBECONFIG": str(kubeconfig)}
    with api._changed:  # held, so that no list is answered
        process = subprocess.Popen(
            [sys.executable, "-c", _HUNG, ADDRESS], stdout=subprocess.PIPE, text=True, env=environ
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        left = time.monotonic()
        assert process.wait(30) == 0
        assert time.monotonic() - left < endpoint_watch._SLACK_S / 2
        process.stdout.close()
    assert api.lists == [""]


def test_the_package_is_imported_by_those_who_watch_only() -> None:
    program = (
        "import sys, treeserve_router.main, treeserve_speculator.main as m;"
        "m.PeerWatch(['dns://a:1', 'b:1']); print('kubernetes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- Configuration


@pytest.mark.parametrize(
    "address",
    [
        "kubernetes://serving/verifiers",
        "kubernetes://serving/verifiers:",
        "kubernetes://serving/verifiers:0",
        "kubernetes://serving/verifiers:65536",
        "kubernetes://serving/verifiers:gRPC",
        "kubernetes://verifiers:50052",
        "kubernetes:///verifiers:50052",
        "kubernetes://serving/a/b:50052",
        "kubernetes://Serving/verifiers:50052",
        "kubernetes://serving/verifiers,kubernetes.io/x=y:50052",
    ],
)
def test_another_form_is_refused(api: FakeKubernetes, address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="kubernetes://NAMESPACE/SERVICE:PORT"):
        PeerWatch([address])


@pytest.mark.usefixtures("kubeconfig")
def test_without_a_cluster_it_says_what_is_missing() -> None:
    with pytest.raises(InvalidArgumentError, match=r"verifiers: kubernetes:// needs a pod .* or a kubeconfig"):
        PeerWatch([ADDRESS])


async def test_in_a_pod_the_service_account_is_used_and_its_token_followed(
    tmp_path: Path, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority.make(tmp_path).issue(tmp_path / "served")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    token = tmp_path / "token"
    token.write_text("first")
    api = FakeKubernetes(context)
    api.start()
    api.put("a", [endpoint("10.0.0.1")])
    monkeypatch.setenv(incluster_config.SERVICE_HOST_ENV_NAME, "127.0.0.1")
    monkeypatch.setenv(incluster_config.SERVICE_PORT_ENV_NAME, str(api.port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(files.ca_file))
    later = SimpleNamespace(now=lambda: datetime.datetime.now() + datetime.timedelta(hours=1))
    try:
        async with following() as followed:
            await followed.until("10.0.0.1:50052")
            await until(lambda: api.watches)
            token.write_text("second")
            monkeypatch.setattr(
                incluster_config, "datetime", SimpleNamespace(datetime=later, timedelta=datetime.timedelta)
            )
            api.drop()
            await until(lambda: len(api.watches) == 2)
    finally:
        api.stop()
    assert [token.lower() for token in api.tokens] == ["bearer first"] * 2 + ["bearer second"] * 2


@pytest.mark.parametrize("role", ["router", "speculator"])
def test_a_service_that_cannot_watch_says_so_and_exits(role: str, kubeconfig: Path, tmp_path: Path) -> None:
    folder = write_folder(byte_level_bpe(), tmp_path / "model")
    (folder / "config.json").write_text('{"vocab_size": 310}')
    arguments = ["--model-folder", folder, "--model-name", "tiny", "--verifiers", ADDRESS]
    listen = ["--listen", f"unix:{tmp_path}/socket", *(["--http-listen", ""] if role == "router" else [])]
    done = subprocess.run(
        [sys.executable, "-m", f"treeserve_{role}", *map(str, arguments), *listen],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"KUBECONFIG": str(kubeconfig)},
    )
    assert done.returncode == 1
    assert f"treeserve_{role}: verifiers: kubernetes:// needs a pod" in done.stderr
    assert "Traceback" not in done.stderr
