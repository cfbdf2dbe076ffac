"""The sets of values the chart suite renders, and ways to look at the manifests that come out."""

from __future__ import annotations

from typing import Any

ROLES = ("router", "verifier", "speculator")
MONITORING = ("--api-versions", "monitoring.coreos.com/v1/PodMonitor")

SCALED = {"enabled": True, "minReplicas": 3, "maxReplicas": 9}
EVERYTHING: dict[str, Any] = {
    "image": {"tag": "1.2.3", "pullSecrets": ["registry"]},
    "model": {"existingClaim": "models"},
    "redis": {"url": "rediss://:$(REDIS_PASSWORD)@valkey.data:6380/0", "passwordSecret": "valkey"},
    "logLevel": "debug",
    "otlpEndpoint": "http://collector.observability:4317",
    "drain": {"preStopSeconds": 30, "seconds": 600},
    "router": {
        "autoscaling": SCALED,
        "config": {
            "max_queued_requests": 64,
            "max_queued_tokens": 2_000_000,
            "tenant_header": "x-tenant",
            "qos": {"realtime": {"ttft_ms": 250, "reserved_slots": 2}, "standard": {"ttft_ms": "", "sheddable": False}},
            "tenants": {"acme": {"weight": 2.5, "max_in_progress": 8}, "*": {"tokens_per_minute": 1e6}},
        },
    },
    "verifier": {
        "autoscaling": {**SCALED, "podMetric": {"name": "treeserve_step_saturation", "target": "800m"}},
        "gpu": {"count": 2, "runtimeClass": "nvidia"},
        "config": {"kv_tokens": 3_000_000, "max_context_tokens": 131072, "draft_wait_ms": 2.5, "reflection": False},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "serving", "effect": "NoSchedule"}],
    },
    "speculator": {
        "autoscaling": SCALED,
        "config": {"sources": ["ngram", "ssm"], "ssm_folder": "/models/draft", "max_nodes": 24},
    },
    "networkPolicy": {"clientNamespaces": ["apps"], "monitoringNamespace": "monitoring"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "scaled": {role: {"autoscaling": {"enabled": True}} for role in ROLES},
    "keda": {
        "router": {"autoscaling": {"enabled": True}},
        "verifier": {"autoscaling": {**SCALED, "keda": {"enabled": True}}},
        "speculator": {"autoscaling": {"enabled": True, "keda": {"enabled": True}}},
        "networkPolicy": {"clientNamespaces": ["apps"], "kedaNamespace": "keda-system"},
    },
    "gpu": {"verifier": {"gpu": {"count": 1}}},
    "open": {"networkPolicy": {"enabled": False}, "speculator": {"replicas": 0}, "redis": {"url": "redis://valkey"}},
    "watched": {
        "discovery": "kubernetes",
        "redis": {"url": "redis://valkey"},
        "networkPolicy": {"clientNamespaces": ["apps"], "apiServerPorts": [16443]},
    },
    "tls": {"tls": {"secretName": "certificates"}},
    "keys": {"auth": {"keysSecretName": "api-keys"}},
    "secured": {
        "tls": {"secretName": "certificates"},
        "auth": {"keysSecretName": "api-keys", "testKeySecretName": "test-key"},
        "router": {"config": {"require_client_certs": True}},
        "networkPolicy": {"clientNamespaces": ["apps"], "monitoringNamespace": "monitoring"},
    },
    "everything": EVERYTHING,
}

# Not Kubernetes's own: what validates these is not at hand.
CUSTOM_RESOURCES = {"PodMonitor", "ScaledObject"}

Manifest = dict[str, Any]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Manifests of a kind by the role they belong to."""
    return {m["metadata"]["labels"]["app.kubernetes.io/component"]: m for m in manifests if m["kind"] == kind}


def pods(manifests: list[Manifest]) -> list[Manifest]:
    """Metadata and spec of every pod the manifests lead to, the helm test's too."""
    return [m["spec"]["template"] for m in of_kind(manifests, "Deployment").values()] + [
        m for m in manifests if m["kind"] == "Pod"
    ]


def container(deployment: Manifest) -> Manifest:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
