"""What a request is promised: the class's policy, its own targets, and who may ask for more than is due."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treeserve_core.errors import InvalidArgumentError, PermissionDeniedError
from treeserve_core.qos import DEFAULT_POLICIES, QosPolicy
from treeserve_core.sampling import SequenceLimits, ServiceClass
from treeserve_router.admission import tenant_label
from treeserve_router.config import RouterConfig
from treeserve_router.qos import ServiceLevels, policies_from
from treeserve_router.tenants import TenantPolicy, Tenants, tenants_from
from treeserve_wire.config import ConfigError, load_config

REALTIME, INTERACTIVE, STANDARD, BATCH = ServiceClass
HEADER = "x-class"


def resolve(
    levels: ServiceLevels, service_class: ServiceClass | None = None, header: Sequence[str] = (), **asked: Any
) -> SequenceLimits:
    limits = SequenceLimits(service_class=service_class or STANDARD, **asked)
    values = {HEADER: header}
    return levels.resolve(limits, class_given=service_class is not None, values=lambda key: values.get(key, ()))


@pytest.mark.parametrize("service_class", ServiceClass)
def test_what_is_not_asked_for_is_the_classes(service_class: ServiceClass) -> None:
    policy = DEFAULT_POLICIES[service_class]
    limits = resolve(ServiceLevels(), service_class)
    assert (limits.ttft_ms, limits.tpot_ms) == (policy.ttft_ms, policy.tpot_ms)
    assert (limits.max_nodes, limits.preemptible) == (policy.max_nodes, service_class is BATCH)


def test_a_request_that_names_no_class_has_the_default() -> None:
    assert resolve(ServiceLevels()).service_class is STANDARD
    assert resolve(ServiceLevels(default_class=BATCH)).service_class is BATCH


def test_targets_of_the_request_count_and_nodes_may_only_be_fewer() -> None:
    levels = ServiceLevels({**DEFAULT_POLICIES, INTERACTIVE: QosPolicy(ttft_ms=1000, max_nodes=8)})
    limits = resolve(levels, INTERACTIVE, ttft_ms=50, tpot_ms=20, max_nodes=100)
    assert (limits.ttft_ms, limits.tpot_ms, limits.max_nodes) == (50, 20, 8)
    assert resolve(levels, INTERACTIVE, max_nodes=3).max_nodes == 3
    assert resolve(levels, INTERACTIVE, max_nodes=0).max_nodes == 0


class TestUntrusted:
    levels = ServiceLevels(class_header=HEADER, trust_clients=False)

    def test_the_gateway_says_what_is_due(self) -> None:
        limits = resolve(self.levels, header=["interactive"])
        assert (limits.service_class, limits.ttft_ms) == (INTERACTIVE, DEFAULT_POLICIES[INTERACTIVE].ttft_ms)
        assert resolve(self.levels, INTERACTIVE, ["realtime"]).service_class is INTERACTIVE

    @pytest.mark.parametrize("header", [[], ["realtime", "realtime"]])
    def test_without_one_clear_word_of_the_gateway_the_default_is_due(self, header: list[str]) -> None:
        assert resolve(self.levels, header=header).service_class is STANDARD
        with pytest.raises(PermissionDeniedError, match=r"service_level\.service_class: realtime is more urgent"):
            resolve(self.levels, REALTIME, header)

    def test_less_than_is_due_is_anybodys(self) -> None:
        limits = resolve(self.levels, BATCH, ["realtime"])
        assert (limits.service_class, limits.preemptible) == (BATCH, True)
        limits = resolve(self.levels, STANDARD, ttft_ms=9000, tpot_ms=500, max_nodes=1)
        assert (limits.ttft_ms, limits.tpot_ms, limits.max_nodes) == (9000, 500, 1)

    @pytest.mark.parametrize(
        ("service_class", "asked", "named"),
        [
            (STANDARD, {"ttft_ms": 4999}, "ttft_ms"),
            (STANDARD, {"tpot_ms": 1}, "tpot_ms"),
            (BATCH, {"tpot_ms": 10_000}, "tpot_ms"),  # no target is the loosest
        ],
    )
    def test_tighter_targets_are_not(self, service_class: ServiceClass, asked: dict[str, Any], named: str) -> None:
        with pytest.raises(PermissionDeniedError, match=named):
            resolve(self.levels, service_class, **asked)

    def test_a_gateway_that_names_no_class_is_misconfigured(self) -> None:
        with pytest.raises(InvalidArgumentError, match="'gold' is none of") as refused:
            resolve(self.levels, header=["gold"])
        assert refused.value.field == HEADER


def test_a_header_that_is_not_configured_means_nothing() -> None:
    assert resolve(ServiceLevels(trust_clients=False), header=["realtime"]).service_class is STANDARD


def test_a_trusted_client_may_ask_for_more_than_the_gateway_says() -> None:
    levels = ServiceLevels(class_header=HEADER, trust_clients=True)
    assert resolve(levels, REALTIME, ["batch"], ttft_ms=1).service_class is REALTIME


# --- Configuration


def config(**fields: Any) -> RouterConfig:
    return RouterConfig(Path("m"), "m", **fields)


@pytest.mark.parametrize(
    ("fields", "trusted"),
    [
        ({}, True),
        ({"tenant_header": "x-tenant"}, False),
        ({"service_class_header": HEADER}, False),
        ({"tenant_header": "x-tenant", "trust_clients": True}, True),
        ({"trust_clients": False}, False),
    ],
)
def test_clients_are_trusted_where_no_gateway_stands_in_front(fields: dict[str, Any], trusted: bool) -> None:
    assert config(**fields).service_levels.trust_clients is trusted


def test_policies_differ_from_the_defaults_where_they_are_configured() -> None:
    policies = policies_from({"realtime": {"ttft_ms": 250, "weight": 16}, "standard": {"ttft_ms": None, "tpot_ms": ""}})
    assert policies[REALTIME] == QosPolicy(ttft_ms=250, tpot_ms=30, weight=16, reserved_slots=1)
    assert policies[STANDARD] == QosPolicy(weight=2, sheddable=True)
    assert policies[BATCH] == DEFAULT_POLICIES[BATCH]


REQUIRED = ["--model-folder", "m", "--model-name", "m"]


def test_mappings_come_from_a_file_the_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("qos: {realtime: {ttft_ms: 1}}\ntenants:\n  acme: {weight: 2}\n")
    environ = {"TREESERVE_CONFIG": str(file), "TREESERVE_QOS": "{realtime: {ttft_ms: 2}}"}
    loaded = load_config(RouterConfig, REQUIRED, environ)
    assert (loaded.qos[REALTIME].ttft_ms, loaded.tenants["acme"].weight) == (2, 2)
    loaded = load_config(RouterConfig, [*REQUIRED, '--qos={"realtime": {"ttft_ms": 3}}', "--tenants="], environ)
    assert (loaded.qos[REALTIME].ttft_ms, loaded.tenants) == (3, {})


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("qos", "{gold: {}}", "'gold' is none of realtime, interactive, standard, batch"),
        ("qos", "{realtime: {ttft: 3}}", r"qos\.realtime: unknown field 'ttft'; known are max_nodes"),
        ("qos", "{realtime: {ttft_ms: -1}}", r"qos\.realtime: ttft_ms: must be a positive number"),
        ("qos", "{realtime: {weight: null}}", r"qos\.realtime: expected float"),
        ("qos", "[realtime]", "expected a mapping"),
        ("qos", "{realtime: 5}", r"qos\.realtime: expected a mapping"),
        ("qos", "{a: [", "--qos: while parsing"),
        ("tenants", "{acme: {weight: 0}}", r"tenants\.acme: weight: must be a number above 0"),
        ("tenants", "{acme: {max_in_progress: 0.5}}", "expected int"),
        ("queue-policy", "lifo", "queue_policy: is none of qos, fifo"),
        ("default-service-class", "gold", "default_service_class: 'gold' is none of"),
        ("service-class-header", "X-Class", "service_class_header: is no lower-case header name"),
        ("max-queued-bytes", "0", "max_queued_bytes"),
        ("ageing-s", "-1", "ageing_s"),
    ],
)
def test_what_cannot_be_meant_is_refused(flag: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(RouterConfig, [*REQUIRED, f"--{flag}={text}"], {})


def test_tenants_inherit_from_everyone_else() -> None:
    tenants = Tenants(tenants_from({"acme": {"weight": 2}, "*": {"requests_per_minute": 60, "max_in_progress": 4}}))
    assert tenants.policy(tenant_label("acme")) == TenantPolicy(2, requests_per_minute=60, max_in_progress=4)
    assert tenants.policy(tenant_label("other")) == TenantPolicy(requests_per_minute=60, max_in_progress=4)
    assert tenants.policy("") == tenants.policy(tenant_label("other"))
    assert Tenants({}).weight(tenant_label("acme")) == 1
