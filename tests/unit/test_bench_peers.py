"""The benchmark against peers: its prompts, its arithmetic, and that a system which cannot run is skipped and named."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.waiting import until

from benchmarks.peers import report, run
from benchmarks.peers.client import HttpClient, last_event
from benchmarks.peers.peer import PeerError, Reply, Settings
from benchmarks.peers.process import Program, process_tree, resume, suspend, tree_memory
from benchmarks.peers.report import Cell
from benchmarks.peers.rounds import Plan, Rounds
from benchmarks.peers.tasks import TASKS, Request, load_tasks, select_requests
from benchmarks.peers.treeserve import up_arguments, verifier_setting

WITH_SOURCE = ("summary", "rewrite", "extraction")


def reply(task: str = "chat", began: float = 0.0, seconds: float = 1.0, tokens: Sequence[int] = (5, 6)) -> Reply:
    return Reply(task, began, began + seconds / 2, began + seconds, len(tokens), tuple(tokens), steps=1)


# --- prompts


def test_each_task_has_many_distinct_well_formed_prompts() -> None:
    tasks = load_tasks()
    assert tuple(tasks) == TASKS and len(TASKS) == 6
    questions = [conversation[-1]["content"] for prompts in tasks.values() for conversation in prompts]
    assert len({question[:60] for question in questions}) >= len(questions) - 1
    assert len(set(questions)) == len(questions)
    for task, prompts in tasks.items():
        assert 8 <= len(prompts) <= 12
        for conversation in prompts:
            assert [set(message) for message in conversation] == [{"role", "content"}] * len(conversation)
            assert conversation[-1]["role"] == "user"
            words = len(conversation[-1]["content"].split())
            assert (50 if task in WITH_SOURCE else 5) <= words <= 400


def render(conversation: Sequence[dict[str, str]]) -> list[int]:
    return [int(conversation[-1]["content"])]


NUMBERED = {task: [[{"content": str(100 * t + i)}] for i in range(4)] for t, task in enumerate(TASKS)}


def test_requests_take_the_tasks_in_turn_and_start_where_asked() -> None:
    requests = select_requests(NUMBERED, render, 14, first=3, max_tokens=7)
    assert [r.task for r in requests[:7]] == [*TASKS, TASKS[0]]
    assert [r.token_ids[0] % 100 for r in requests] == [3] * 6 + [0] * 6 + [1] * 2
    assert len({r.token_ids for r in requests}) == 14
    assert {r.max_tokens for r in requests} == {7}


def test_a_prompt_never_comes_twice_in_a_turn() -> None:
    with pytest.raises(ValueError, match="25 requests"):
        select_requests(NUMBERED, render, 25, first=0, max_tokens=7)


@pytest.mark.parametrize("plan", [run.FULL, run.QUICK])
def test_plans_fit_the_prompts(plan: Plan) -> None:
    assert set(plan.requests) == {1, 8, 32}
    tasks = load_tasks()
    for batch, count in plan.requests.items():
        assert count >= batch
        chosen = select_requests(tasks, lambda c: [hash(c[-1]["content"])], count, 0, plan.max_tokens)
        assert {r.task for r in chosen} == set(TASKS)


# --- arithmetic


def test_busy_time_counts_overlaps_once_and_gaps_not_at_all() -> None:
    assert report.busy_s([reply(began=10, seconds=2), reply(began=0, seconds=3), reply(began=1, seconds=1)]) == 5.0


def test_throughput_of_a_task_at_batch_1_is_its_tokens_over_its_time() -> None:
    cell = Cell(0, "hf", 1, (reply("chat", 0, 2), reply("code", 2, 1), reply("chat", 3, 2)))
    assert cell.tokens_per_s == pytest.approx(6 / 5)
    assert cell.tokens_per_s_of("chat") == pytest.approx(4 / 4)
    assert cell.tokens_per_s_of("code") == pytest.approx(2 / 1)
    assert cell.tokens_per_s_of("story") is None


def test_throughput_of_a_task_in_a_batch_is_what_a_batch_of_it_would_give() -> None:
    cell = Cell(0, "hf", 2, (reply("chat", 0, 2), reply("code", 0, 1)))
    assert cell.tokens_per_s == pytest.approx(4 / 2)
    assert cell.tokens_per_s_of("code") == pytest.approx(2 * 2 / 1)


def test_latencies() -> None:
    cell = Cell(0, "hf", 1, (Reply("chat", 1.0, 1.5, 3.5, 5), Reply("chat", 1.0, 1.1, 1.5, 1)))
    assert cell.ttft_ms == pytest.approx(300)
    assert cell.tpot_ms == pytest.approx(450)


def cells(*seconds: float, system: str, batch: int = 1) -> list[Cell]:
    return [Cell(i, system, batch, (reply(seconds=s),)) for i, s in enumerate(seconds)]


def test_medians_are_over_rounds() -> None:
    assert report.medians(cells(1, 2, 8, system="hf"), lambda c: c.tokens_per_s) == {"hf": {"1": 1.0}}
    assert report.by_round(cells(1, 2, system="hf")) == {"hf": {"1": [2.0, 1.0]}}
    assert report.by_task(cells(1, 2, 8, system="hf")) == {"hf": {"1": {"chat": 1.0}}}


def test_ratios_pair_the_rounds() -> None:
    both = cells(1, 4, 1, system="on") + cells(2, 4, 3, system="off")  # ratios 2, 1, 3; ratio of medians: 3
    assert report.ratios(both, "on", "off") == {"1": {"all": 2.0, "chat": 2.0}}


def test_overhead_pairs_the_requests() -> None:
    both = cells(1.0, 2.2, 9.0, system="off") + cells(1.0, 2.0, 3.0, system="bare")
    assert report.overhead(both, "off", "bare") == pytest.approx(0.1)
    assert report.overhead(both, "off", "nobody") is None


def test_equality_of_tokens() -> None:
    on = Cell(0, "on", 1, (reply(tokens=(1, 2)), reply(tokens=(3, 4))))
    off = Cell(0, "off", 1, (reply(tokens=(1, 2)), reply(tokens=(3, 5))))
    assert report.equal_share([on, off], "on", "off") == 0.5


def test_tokens_after_the_end_are_counted_for_each_task() -> None:
    cell = Cell(0, "off", 1, (reply("chat", tokens=(7, 2, 9, 9)), reply("code", tokens=(7, 8, 9, 9))))
    assert report.share_past_end([cell], "off", [2]) == {"chat": 0.5, "code": 0.0}


def test_tokens_per_step() -> None:
    cell = Cell(0, "on", 8, (Reply("chat", 0, 1, 2, 9, steps=3), Reply("chat", 0, 1, 2, 3, steps=3)))
    assert report.tokens_per_step([cell], "on") == {"8": {"chat": 2.0}}


# --- rounds


@dataclass(eq=False)
class FakePeer:
    """Answers at once; a program of its own stands for its process."""

    systems: tuple[str, ...]
    stays_up: bool = False
    fails: str = ""
    journal: list[str] = field(default_factory=list)
    only_batch_1: bool = False
    command: str = "fake"
    threads: int = 1
    pid: int = 0

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return "fake 1"

    def unsupported(self, system: str, batch: int) -> str | None:
        return "one at a time" if self.only_batch_1 and batch > 1 else None

    def start(self) -> float:
        if self.fails == "start":
            raise PeerError("cannot start")
        self._program = Program((sys.executable, "-c", "import time; time.sleep(60)"), {})
        self.pid = self._program.pid
        self.journal.append("start")
        return 0.5

    def generate(self, system: str, requests: Sequence[Request], concurrency: int) -> list[Reply]:
        assert state(self.pid) != "T", "asked while suspended"
        if self.fails == "generate" and requests[0].task != "warm-up":
            raise PeerError("broke")
        self.journal.append(f"{system} {requests[0].task} {len(requests)}x{concurrency}")
        return [reply(r.task, began=float(i), tokens=(1,) * r.max_tokens) for i, r in enumerate(requests)]

    def stop(self) -> None:
        self.journal.append("stop")
        if self.fails != "start":
            self._program.stop()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def run_rounds(*groups: tuple[FakePeer, ...], rounds: int = 2) -> Rounds:
    def requests_of(_round: int, batch: int) -> list[Request]:
        return select_requests(NUMBERED, render, 6 if batch == 1 else 8, 0, 4)

    ran = Rounds(Plan(rounds, 4, {1: 6, 8: 8}), groups, requests_of, lambda line: None)
    ran.run()
    return ran


def test_a_group_alternates_request_by_request_at_batch_1() -> None:
    peer = FakePeer(("a", "b"))
    run_rounds((peer,), rounds=1)
    turn = peer.journal[: peer.journal.index("stop")]
    assert turn[:3] == ["start", "a warm-up 1x1", "b warm-up 1x1"]
    pairs = [set(turn[i : i + 2]) for i in range(3, 15, 2)]
    assert pairs == [{f"a {task} 1x1", f"b {task} 1x1"} for task in NUMBERED]
    assert len({line[0] for line in turn[3:15:2]}) == 2  # each begins sometimes
    assert set(peer.journal[-3:-1]) == {"a chat 8x8", "b chat 8x8"}


def test_what_starts_quickly_starts_for_each_turn_and_what_does_not_is_suspended() -> None:
    quick, slow = FakePeer(("quick",)), FakePeer(("slow",), stays_up=True)
    ran = run_rounds((quick,), (slow,))
    assert quick.journal.count("start") == quick.journal.count("stop") == 4
    assert slow.journal.count("start") == slow.journal.count("stop") == 1
    assert ran.start_up_s == {"quick": [0.5] * 4, "slow": [0.5]}
    assert {c.system for c in ran.cells} == {"quick", "slow"} and len(ran.cells) == 8
    assert set(ran.memory) == {"quick", "slow"}


@pytest.mark.parametrize("fails", ["start", "generate"])
def test_a_peer_that_fails_is_skipped_and_named(fails: str) -> None:
    broken, sound = FakePeer(("broken",), fails=fails), FakePeer(("sound",))
    ran = run_rounds((broken,), (sound,))
    assert list(ran.skipped) == ["broken"]
    assert {c.system for c in ran.cells} == {"sound"} and len(ran.cells) == 4
    assert broken.journal.count("stop") == 1


def test_the_report_has_every_batch_of_every_system_and_says_why_one_is_null() -> None:
    lookup = FakePeer(("hf_lookup",), only_batch_1=True)
    ran = run_rounds((lookup,))
    result = run.summary(ran, [(lookup,)], {"vllm": "not installed"}, Plan(2, 4, {1: 6, 8: 8}), [2])
    assert result["tokens_per_s"] == {"hf_lookup": {"1": pytest.approx(24.0), "8": None}}
    assert result["unsupported"] == {"hf_lookup": {"8": "one at a time"}}
    assert result["skipped"] == {"vllm": "not installed"}
    assert set(result["tokens_per_s_by_task"]["hf_lookup"]["1"]) == set(TASKS)
    assert result["start_up_s"] == {"hf_lookup": 0.5}
    assert result["memory_mb"]["hf_lookup"]["peak_rss"] > 1
    assert result["versions"] == {"hf_lookup": "fake 1"} and result["commands"] == {"hf_lookup": "fake"}
    json.dumps(result)


def test_peers_that_are_not_installed_are_named(tmp_path: Path) -> None:
    settings = Settings("m.gguf", "m", "cache", str(tmp_path), 1, 1024, 8)
    options = run.parse_options(["--systems", "llama_cpp,vllm_ngram,hf"])
    missing = run.missing_systems(run.make_groups(settings, options))
    assert set(missing) == {"llama_cpp", "vllm_ngram"}
    assert all("make peers" in reason for reason in missing.values())


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(SystemExit):
        run.parse_options(["--systems", "llama_cpp,olama"])


# --- processes and streams


async def test_a_suspended_tree_stands_still_children_too() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1); import time; time.sleep(60)'])"
    parent = Program((sys.executable, "-uc", nested), {}, piped=True)
    tree: list[int] = []
    try:
        await until(lambda: len(process_tree(parent.pid)) == 2)
        tree = process_tree(parent.pid)
        suspend(parent.pid)
        await until(lambda: [state(pid) for pid in tree] == ["T", "T"])
        resume(parent.pid)
        await until(lambda: "T" not in [state(pid) for pid in tree])
        assert len(tree_memory(parent.pid)) == 2
        assert all(m.peak_rss_mb > 1 for m in tree_memory(parent.pid))
        suspend(parent.pid)
    finally:
        parent.stop()
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tree))


class _Events(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if body["n"] else 500)
        self.end_headers()
        for i in range(body["n"]):
            self.wfile.write(b'data: {"count": %d}\n\n' % (i + 1))
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_args: object) -> None:
        pass


def test_the_http_client_reads_a_stream_to_its_end_and_reports_refusals() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Events)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = HttpClient(server.server_port, "/", lambda r: {"n": r.max_tokens}, lambda event: int(event["count"]))
    try:
        replies = client.generate([Request("chat", (1,), n) for n in (3, 1, 2)], 2)
        assert [r.num_tokens for r in replies] == [3, 1, 2]
        assert all(r.began < r.first_token <= r.ended for r in replies)
        with pytest.raises(PeerError, match="500"):
            client.generate([Request("chat", (1,), 0)], 1)
    finally:
        client.close()
        server.shutdown()
        server.server_close()


def test_a_stream_without_events_is_an_error() -> None:
    assert last_event(b'data: {"a": 1}\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n') == {"a": 2}
    with pytest.raises(PeerError, match="no event"):
        last_event(b"data: [DONE]\n\n")


def test_options_of_the_cluster_and_settings_of_its_services() -> None:
    options = ("dtype=int8", "sources=ngram,suffix", "verifier.threads=2")
    arguments = up_arguments("cache", 1024, options)
    assert arguments[-3:] == ["--dtype=int8", "--sources=ngram,suffix", "--settings=verifier.threads=2"]
    assert verifier_setting(options, "threads", "1") == "2"
    assert verifier_setting(("threads=3",), "threads", "1") == "3"
    assert verifier_setting(options, "kv_dtype", "auto") == "auto"
