"""The benchmark of service levels: its trace, its targets, its scoring and its report."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from support.fake_streams import arrival, record

from benchmarks.local_cluster import cluster_config
from benchmarks.peers.peer import PeerError, Settings
from benchmarks.peers.tasks import TASKS
from benchmarks.rendered_prompts import conversations
from benchmarks.slo import report, run, score
from benchmarks.slo.load import Record
from benchmarks.slo.report import Level
from benchmarks.slo.systems import BASELINES, FIXED, TREESERVE, make_systems
from benchmarks.slo.targets import MULTIPLES, Multiple, Target, median_target, parse_multiple, targets_from
from benchmarks.slo.trace import CLASSES, MIX, make_trace, poisson_times
from treeserve_core.sampling import ServiceClass
from treeserve_router.config import RouterConfig
from treeserve_simulator.percentiles import percentiles
from treeserve_simulator.trace import TraceRequest
from treeserve_wire.config import load_config

PROMPTS = {kind: [(100 * k + i,) * (i + 1) for i in range(5)] for k, kind in enumerate(TASKS)}
TARGETS = dict.fromkeys(CLASSES, Target(200.0, 20.0))


# --- trace


def test_arrivals_come_at_the_rate_and_independently() -> None:
    times = poisson_times(50.0, 40.0, random.Random(1))
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 40.0
    assert len(times) == pytest.approx(2000, rel=0.1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # as gaps of a Poisson process have it


def test_a_trace_mixes_classes_kinds_and_lengths_and_is_the_same_for_the_same_seed() -> None:
    times = [i / 100 for i in range(2000)]
    trace = make_trace(times, PROMPTS, random.Random(7))
    assert trace == make_trace(times, PROMPTS, random.Random(7))
    assert trace != make_trace(times, PROMPTS, random.Random(8))
    assert [a.at_s for a in trace] == times
    classes, kinds = Counter(a.service_class for a in trace), Counter(a.kind for a in trace)
    for name, share in MIX.items():
        assert classes[name] == pytest.approx(2000 * share.share, rel=0.15)
        low, high = share.output_tokens
        lengths = {a.output_tokens for a in trace if a.service_class == name}
        assert min(lengths) == low and max(lengths) == high
    assert set(kinds) == set(TASKS) and min(kinds.values()) > 250
    assert len({a.temperature for a in trace}) == 2 and len({a.seed for a in trace}) > 1990
    assert all(a.token_ids in PROMPTS[a.kind] for a in trace)


def test_no_tenant_asks_the_same_twice_and_there_are_no_more_tenants_than_that_takes() -> None:
    trace = make_trace([0.0] * 300, PROMPTS, random.Random(3))
    asked = Counter((a.tenant, a.token_ids) for a in trace)
    assert set(asked.values()) == {1}
    assert len({a.tenant for a in trace}) == -(-max(Counter(a.kind for a in trace).values()) // 5)


def test_a_line_of_the_trace_is_what_the_simulator_reads() -> None:
    trace = make_trace([0.25], PROMPTS, random.Random(0))
    (request,) = map(TraceRequest.from_json, [json.loads(json.dumps(a.line())) for a in trace])
    assert (request.at_s, request.prompt_tokens, request.output_tokens) == (
        0.25,
        len(trace[0].token_ids),
        trace[0].output_tokens,
    )
    assert request.service_class is ServiceClass[trace[0].service_class.upper()]
    assert (request.tenant, request.kind) == (trace[0].tenant, trace[0].kind)


def test_there_are_enough_prompts_of_each_kind() -> None:
    ours = conversations()
    assert tuple(ours) == TASKS
    for each in ours.values():
        assert len({c[-1]["content"] for c in each}) == len(each) >= 20


# --- targets


@pytest.mark.parametrize(
    ("given", "met"),
    [
        (record(ttft_s=0.2, tpot_s=0.02), True),
        (record(ttft_s=0.201, tpot_s=0.01), False),
        (record(ttft_s=0.1, tpot_s=0.021), False),
        (record(ttft_s=0.1, tokens=1), True),  # there is no second token to wait for
        (Record(arrival(), "unfinished", ((0.1, 1),)), False),
        (Record(arrival(), "shed"), False),
        (Record(arrival(), "finished"), False),
    ],
)
def test_a_request_meets_its_targets_only_if_it_ends_and_both_hold(given: Record, met: bool) -> None:
    assert Target(200.0, 20.0 + 1e-9).is_met_by(given) is met


def test_targets_are_multiples_of_the_unloaded_medians() -> None:
    unloaded = median_target([record(ttft_s=s, tpot_s=s / 10) for s in (0.1, 0.2, 0.9)] + [Record(arrival(), "shed")])
    assert (unloaded.ttft_ms, unloaded.tpot_ms) == (pytest.approx(200), pytest.approx(20))
    targets = targets_from(Target(200.0, 20.0), {**MULTIPLES, "realtime": Multiple(2, 1.5)})
    assert targets["realtime"] == Target(400.0, 30.0)
    assert set(targets) == set(CLASSES)
    tightness = [(MULTIPLES[name].ttft, MULTIPLES[name].tpot) for name in CLASSES]
    assert tightness == sorted(tightness)
    with pytest.raises(ValueError, match="no request"):
        median_target([Record(arrival(), "shed")])


def test_multiples_of_the_command_line() -> None:
    assert parse_multiple("batch=50:8.5") == ("batch", Multiple(50, 8.5))
    for wrong in ("bulk=1:2", "batch=1", "batch"):
        with pytest.raises(ValueError):
            parse_multiple(wrong)


# --- scoring


def test_figures_count_violations_goodput_and_throughput() -> None:
    records = [
        record(ttft_s=0.1, tokens=6),
        record(ttft_s=0.5, tokens=8),  # late
        record(at_s=9.95, ttft_s=0.1, tokens=4),  # in time, but after the window
        Record(arrival(), "shed"),
    ]
    found = score.figures(records, TARGETS, 10.0)
    assert (found["requests"], found["violations"], found["attainment"]) == (4, 2, 0.5)
    assert found["goodput"] == pytest.approx((6 + 4) / 10)
    assert found["throughput"] == pytest.approx((6 + 8) / 10)
    assert found["outcomes"] == {"finished": 3, "shed": 1}
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    twice = score.figures(records * 2, TARGETS, 10.0, runs=2)
    assert (twice["goodput"], twice["throughput"]) == (found["goodput"], found["throughput"])


def test_figures_by_class_judge_each_by_its_own_targets() -> None:
    targets = TARGETS | {"batch": Target(2000.0, 20.0)}
    found = score.by_class([record("batch", ttft_s=1.0), record("realtime", ttft_s=1.0)], targets, 1.0)
    assert {name: row["violations"] for name, row in found.items()} == {"realtime": 1, "batch": 0}


def test_percentiles_leave_out_what_is_missing() -> None:
    assert percentiles([None, 1.0, 3.0])["p50"] == 2.0
    assert percentiles([1.0 * i for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([None]) == {"p50": None, "p95": None, "p99": None}


def test_the_knee_is_the_highest_load_that_the_best_baseline_bears() -> None:
    attainments = {"fifo": [1.0, 0.8, 0.2], "fixed": [0.95, 0.9, 0.1], "treeserve": [1.0, 1.0, 1.0]}
    assert score.knee(attainments, ["fifo", "fixed"]) == 1
    assert score.knee(attainments, ["fifo"]) == 0
    assert score.knee({"fifo": [0.5]}, ["fifo"]) is None


def test_the_sustained_load_lies_where_nine_of_ten_are_met() -> None:
    assert score.sustained_load([1, 2, 4], [1.0, 0.95, 0.7]) == pytest.approx(2 + 2 * 0.05 / 0.25)
    assert score.sustained_load([1, 2], [0.89, 1.0]) is None
    assert score.sustained_load([1, 2], [1.0, 0.9]) == 2


def test_a_system_is_compared_with_the_better_one_in_each_figure() -> None:
    violations, goodput = {"treeserve": 5, "fifo": 20, "fixed": 30}, {"treeserve": 90.0, "fifo": 30.0, "fixed": 60.0}
    assert score.compared(violations, goodput, "treeserve") == {"violations_divided_by": 4.0, "goodput_times": 1.5}
    assert score.compared({"treeserve": 0, "fifo": 3}, {"treeserve": 1.0, "fifo": 0.0}, "treeserve") == {
        "violations_divided_by": None,
        "goodput_times": None,
    }


def test_same_tokens_looks_only_at_what_ended_twice() -> None:
    same, other = record(tokens=3), record(tokens=2)
    lost = Record(arrival(), "unfinished", token_ids=(1,))
    assert score.same_tokens([[same, same, same], [same, other, lost]]) == 0.5
    assert score.same_tokens([[same], [lost]]) is None


# --- report


def test_the_report_has_every_figure_by_system_level_and_class(tmp_path: Path) -> None:
    good, late = record("realtime", ttft_s=0.1, tokens=10), record("batch", ttft_s=1.0, tokens=10)
    runs = {
        "treeserve": [[good, good], [good, good], [good, late]],
        "fifo": [[good, good], [good, late], [late, late]],
        "fixed": [[good, late], [late, late], [late, late]],
    }
    levels = [Level(0.5, 1.0), Level(1.0, 2.0), Level(1.5, 3.0)]
    result = report.summary(runs, levels, TARGETS, 10.0)
    assert result["violations"] == {"treeserve": 1, "fifo": 3, "fixed": 5}
    assert result["requests"] == dict.fromkeys(runs, 6)
    assert result["goodput"] == pytest.approx({"treeserve": 50 / 30, "fifo": 30 / 30, "fixed": 10 / 30})
    assert result["treeserve"]["violations_divided_by"] == 3.0
    assert result["by_class"]["fifo"]["batch"]["violations"] == 3
    assert [row["violations"] for row in result["by_level"]["fifo"]] == [0, 1, 2]
    assert result["by_level"]["fifo"][2]["by_class"]["batch"]["requests"] == 2
    assert result["at_knee"]["level"] == 0 and result["at_knee"]["violations"]["fifo"] == 0
    assert result["past_knee"]["level"] == 1
    assert result["past_knee"]["treeserve"] == {"violations_divided_by": None, "goodput_times": pytest.approx(2.0)}
    assert result["saturated"]["level"] == 2 and result["saturated"]["throughput"]["fifo"] == pytest.approx(2.0)
    assert result["sustained_requests_per_s"]["fixed"] is None
    assert result["same_tokens"] == [1.0, 1.0, 1.0]
    json.dumps(result)
    console = Console(record=True, width=120, file=(tmp_path / "out").open("w"))
    report.show(result, console)
    assert "treeserve" in console.export_text()


def test_without_a_knee_the_first_level_is_past_it() -> None:
    late = record(ttft_s=1.0)
    result = report.summary({"treeserve": [[late]], "fifo": [[late]]}, [Level(1.0, 1.0)], TARGETS, 1.0)
    assert result["at_knee"] is None and result["past_knee"]["level"] == 0


def test_a_report_of_one_system_alone_compares_nothing() -> None:
    result = report.summary({"treeserve": [[record()]]}, [Level(1.0, 1.0)], TARGETS, 1.0)
    assert "treeserve" not in result and result["violations"] == {"treeserve": 0}


def test_requests_are_written_for_the_simulator(tmp_path: Path) -> None:
    run.write_requests(tmp_path / "slo", {"fifo": [[record(at_s=1.0, ttft_s=0.25)], [Record(arrival(), "shed")]]})
    lines = [json.loads((tmp_path / "slo" / f"fifo-{level}.jsonl").read_text()) for level in (0, 1)]
    assert TraceRequest.from_json(lines[0]).at_s == 1.0
    assert (lines[0]["ttft_ms"], lines[0]["tokens"], lines[0]["outcome"]) == (pytest.approx(250), 5, "finished")
    assert (lines[1]["ttft_ms"], lines[1]["outcome"]) == (None, "shed")


# --- systems and options


def test_the_baselines_know_no_promises_and_serve_in_order_of_arrival() -> None:
    systems = make_systems(fixed_nodes=6)
    assert systems[TREESERVE].options == () and systems[TREESERVE].promises
    for name in BASELINES:
        assert not systems[name].promises
        given = dict(
            option.removeprefix("router.").split("=", 1) for option in systems[name].options if "router." in option
        )
        flags = [f"--{field.replace('_', '-')}={value}" for field, value in given.items()]
        config = load_config(RouterConfig, ["--model-folder=m", "--model-name=m", *flags], {})
        assert config.queue_policy == "fifo"
        standard = config.qos[ServiceClass.STANDARD]
        assert (standard.ttft_ms, standard.tpot_ms, standard.max_nodes) == (None, None, None)
        assert not standard.sheddable and not standard.preemptible
        assert sum(policy.reserved_slots for policy in config.qos.values()) == 0
    assert "verifier.max_nodes=6" in systems[FIXED].options


def test_cluster_options_become_a_configuration_and_later_ones_win() -> None:
    settings = Settings("m.gguf", "m", "cache", "tools", 1, 4096, 8)
    options = ("speculators=2", "router.qos={batch: {weight: 2, sheddable: false}}", "speculators=0")
    config = cluster_config(settings, options)
    assert (config.speculators, config.kv_tokens, config.grpc_port) == (0, 4096, 0)
    assert config.settings_of("router") == {"qos": "{batch: {weight: 2, sheddable: false}}"}
    with pytest.raises(PeerError, match="refused"):
        cluster_config(settings, ("verifiers=none",))


def test_options_of_the_command_line() -> None:
    options = run.parse_options(["--quick", "--only", "load,tenants", "--loads", "1,2", "--target", "realtime=2:2"])
    assert options.parts == ("load", "tenants") and options.plan.loads == (1.0, 2.0)
    assert options.plan.window_s == run.QUICK.window_s
    assert options.multiples["realtime"] == Multiple(2, 2) and options.multiples["batch"] == MULTIPLES["batch"]
    assert run.parse_options([]).plan == run.FULL
    for wrong in (["--only", "sleep"], ["--loads", "2,1"], ["--target", "x=1:2"], ["--treeserve-set", "threads"]):
        with pytest.raises(SystemExit):
            run.parse_options(wrong)
