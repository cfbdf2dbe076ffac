"""The chart's pods and the objects around them: security, probes, draining, scaling, services, network policies."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from chart_manifests import ROLES, VARIANTS, Manifest, container, of_kind, pods, selects

from treeserve_wire.server import LIVENESS

# Volumes that the restricted pod security standard allows.
RESTRICTED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
RESTRICTED_VOLUMES |= {"secret", "name"}
RBAC_KINDS = ("Role", "RoleBinding")


def config_of(manifests: list[Manifest], role: str) -> dict[str, Any]:
    return yaml.safe_load(of_kind(manifests, "ConfigMap")[role]["data"]["config.yaml"])


def encrypted(manifests: list[Manifest]) -> tuple[str, ...]:
    """Names of the ports that speak TLS."""
    return ("grpc", "http") if "tls" in config_of(manifests, "router") else ()


def is_secured(manifests: list[Manifest]) -> bool:
    """Whether callers have to prove who they are."""
    return bool({"tls", "api_keys_file"} & config_of(manifests, "router").keys())


def test_every_pod_passes_the_restricted_standard(manifests):
    for pod in pods(manifests):
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(set(volume) <= RESTRICTED_VOLUMES for volume in spec["volumes"])
        for each in spec["containers"] + spec.get("initContainers", []):
            security = each["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "runAsUser", "procMount", "seccompProfile"} & set(security)
            assert not any("hostPort" in port for port in each.get("ports", []))


def test_every_pod_is_kept_apart_from_its_surroundings(manifests):
    for pod in pods(manifests):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        accounts = [m["metadata"]["name"] for m in manifests if m["kind"] == "ServiceAccount"]
        assert accounts == [spec["serviceAccountName"]]
        mounted = {volume["name"]: volume for volume in spec["volumes"]}
        for each in spec["containers"]:
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"cpu", "memory"} <= set(each["resources"]["requests"])
            assert "memory" in each["resources"]["limits"]
            assert {mount["name"] for mount in each["volumeMounts"]} == set(mounted)
            writable = {m["mountPath"] for m in each["volumeMounts"] if not m.get("readOnly")}
            assert "/tmp" in writable
            assert writable <= {"/tmp", "/dev/shm"}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_only_pods_that_ask_the_kubernetes_api_hold_a_token(rendered, variant):
    watched = VARIANTS[variant].get("discovery") == "kubernetes"
    holders = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for pod in pods(rendered[variant])
        if pod["spec"]["automountServiceAccountToken"]
    }
    assert holders == ({"router", "speculator"} if watched else set())
    kinds = [m["kind"] for m in rendered[variant]]
    assert kinds.count("Role") == kinds.count("RoleBinding") == (1 if watched else 0)
    assert not {"ClusterRole", "ClusterRoleBinding"} & set(kinds)


def test_the_account_may_read_endpoint_slices_of_its_namespace_only(rendered):
    (account, role, binding) = (of_kind(rendered["watched"], k)["shared"] for k in ("ServiceAccount", *RBAC_KINDS))
    assert account["automountServiceAccountToken"] is False  # each pod says for itself
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]
    assert not {"namespace"} & (role["metadata"].keys() | binding["metadata"].keys())  # the release's
    group = "rbac.authorization.k8s.io"
    assert binding["roleRef"] == {"apiGroup": group, "kind": "Role", "name": role["metadata"]["name"]}
    name = account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "serving"}]


def test_selectors_match_the_pods_of_their_role_and_release_only(manifests, render):
    labels = {role: d["spec"]["template"]["metadata"]["labels"] for role, d in of_kind(manifests, "Deployment").items()}
    other = [
        d["spec"]["template"]["metadata"]["labels"] for d in of_kind(render({}, release="b"), "Deployment").values()
    ]
    for role in ROLES:
        selectors = [
            of_kind(manifests, "Deployment")[role]["spec"]["selector"]["matchLabels"],
            of_kind(manifests, "Service")[role]["spec"]["selector"],
            of_kind(manifests, "PodDisruptionBudget")[role]["spec"]["selector"]["matchLabels"],
            of_kind(manifests, "PodMonitor")[role]["spec"]["selector"]["matchLabels"],
        ]
        for selector in selectors:
            assert [name for name in ROLES if selects(selector, labels[name])] == [role]
            assert not any(selects(selector, foreign) for foreign in other)


def test_every_port_that_is_named_exists(manifests):
    for role, deployment in of_kind(manifests, "Deployment").items():
        ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
        for port in of_kind(manifests, "Service")[role]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
            in_the_clear = {"grpc": "kubernetes.io/h2c", "health": "kubernetes.io/h2c"}.get(port["name"], "http")
            assert port["appProtocol"] == ("https" if port["name"] in encrypted(manifests) else in_the_clear)
        (endpoint,) = of_kind(manifests, "PodMonitor")[role]["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports
        config = yaml.safe_load(of_kind(manifests, "ConfigMap")[role]["data"]["config.yaml"])
        bound = {int(config[key].rpartition(":")[2]) for key in config if key.endswith("listen")}
        assert bound == set(ports.values())  # what the process opens is what the pod declares


def test_probes_ask_the_grpc_port_and_leave_time_to_start(manifests):
    for role, deployment in of_kind(manifests, "Deployment").items():
        ports = {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}
        for probe, service in (("startupProbe", LIVENESS), ("readinessProbe", None), ("livenessProbe", LIVENESS)):
            grpc = container(deployment)[probe]["grpc"]
            # The kubelet knows neither TLS nor keys.
            probed = ports["health" if is_secured(manifests) else "grpc"]
            assert (grpc["port"], grpc.get("service")) == (probed, service), (role, probe)
        startup = container(deployment)["startupProbe"]
        budget = startup["periodSeconds"] * startup["failureThreshold"]
        assert budget >= (600 if role == "verifier" else 60)
        assert deployment["spec"]["progressDeadlineSeconds"] > budget


def test_a_pod_is_given_time_to_drain(manifests):
    for role, deployment in of_kind(manifests, "Deployment").items():
        config = yaml.safe_load(of_kind(manifests, "ConfigMap")[role]["data"]["config.yaml"])
        pre_stop = container(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert pre_stop >= 15
        assert grace > pre_stop + config.get("drain_s", 0)


def test_the_drain_is_a_value(rendered):
    spec = of_kind(rendered["everything"], "Deployment")["verifier"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 30 + 600 + 10


def test_updates_never_need_a_spare_accelerator(manifests):
    deployments = of_kind(manifests, "Deployment")
    assert deployments["verifier"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert deployments["router"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_disruptions_take_one_pod_at_a_time(manifests):
    for budget in of_kind(manifests, "PodDisruptionBudget").values():
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_an_autoscaler_owns_the_replicas(rendered):
    for variant, manifests in rendered.items():
        scalers = of_kind(manifests, "HorizontalPodAutoscaler")
        by_keda = of_kind(manifests, "ScaledObject")
        assert set(by_keda) == ({"verifier", "speculator"} if variant == "keda" else set())
        assert not set(by_keda) & set(scalers)  # KEDA makes an autoscaler of its own
        owned = set(ROLES) if variant in ("scaled", "everything", "keda") else set()
        assert set(scalers) | set(by_keda) == owned
        for role, deployment in of_kind(manifests, "Deployment").items():
            assert ("replicas" in deployment["spec"]) == (role not in owned)
        for role, scaler in (scalers | by_keda).items():
            spec, target = scaler["spec"], scaler["spec"]["scaleTargetRef"]
            assert target["name"] == of_kind(manifests, "Deployment")[role]["metadata"]["name"]
            behavior = (
                spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] if role in by_keda else spec["behavior"]
            )
            assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_keda_asks_the_router_for_the_role_it_scales(rendered):
    scaled = of_kind(rendered["keda"], "ScaledObject")
    service = of_kind(rendered["keda"], "Service")["router"]
    for role, each in scaled.items():
        assert each["apiVersion"] == "keda.sh/v1alpha1"
        spec = each["spec"]
        assert set(spec) == {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"}
        (trigger,) = spec["triggers"]
        assert (trigger["type"], trigger["metricType"]) == ("external", "AverageValue")  # fallback needs the latter
        assert set(trigger["metadata"]) == {"scalerAddress", "role"}
        assert trigger["metadata"]["role"] == role
        name, _, port = trigger["metadata"]["scalerAddress"].rpartition(":")
        assert name == f"{service['metadata']['name']}.serving.svc"
        assert int(port) in [p["port"] for p in service["spec"]["ports"] if p["name"] in ("grpc", "health")]
        # Nobody who does not know the load makes replicas fewer.
        assert spec["fallback"] == {
            "failureThreshold": 3,
            "replicas": spec["minReplicaCount"],
            "behavior": "currentReplicasIfHigher",
        }
    verifier = scaled["verifier"]["spec"]
    assert (verifier["minReplicaCount"], verifier["maxReplicaCount"]) == (3, 9)


def test_a_role_is_scaled_by_keda_only_where_it_is_scaled_at_all(render):
    manifests = render({"verifier": {"autoscaling": {"keda": {"enabled": True}}}})
    assert not of_kind(manifests, "ScaledObject")
    assert of_kind(manifests, "Deployment")["verifier"]["spec"]["replicas"] == 1


def test_an_autoscaler_follows_cpu_or_a_named_metric(rendered):
    (cpu,) = of_kind(rendered["everything"], "HorizontalPodAutoscaler")["router"]["spec"]["metrics"]
    (named,) = of_kind(rendered["everything"], "HorizontalPodAutoscaler")["verifier"]["spec"]["metrics"]
    assert cpu["resource"]["target"] == {"type": "Utilization", "averageUtilization": 70}
    assert named["pods"] == {
        "metric": {"name": "treeserve_step_saturation"},
        "target": {"type": "AverageValue", "averageValue": "800m"},
    }


def test_only_verifiers_get_accelerators(rendered):
    for role, deployment in of_kind(rendered["everything"], "Deployment").items():
        spec = deployment["spec"]["template"]["spec"]
        assert container(deployment)["resources"]["limits"].get("nvidia.com/gpu") == (2 if role == "verifier" else None)
        assert spec.get("runtimeClassName") == ("nvidia" if role == "verifier" else None)
    verifier = of_kind(rendered["everything"], "Deployment")["verifier"]["spec"]["template"]["spec"]
    assert verifier["nodeSelector"] == {"pool": "gpu"}
    assert [toleration["key"] for toleration in verifier["tolerations"]] == ["dedicated", "nvidia.com/gpu"]
    default = of_kind(rendered["default"], "Deployment")["verifier"]["spec"]["template"]["spec"]
    assert "tolerations" not in default


def test_a_verifier_has_shared_memory_in_memory(manifests):
    volumes = of_kind(manifests, "Deployment")["verifier"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in volumes


def test_the_model_is_mounted_read_only_by_every_role(rendered):
    for deployment in of_kind(rendered["everything"], "Deployment").values():
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        assert {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in volumes
        mounts = container(deployment)["volumeMounts"]
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in mounts


def test_the_redis_password_stays_in_its_secret(rendered):
    env = {
        variable["name"]: variable
        for variable in container(of_kind(rendered["everything"], "Deployment")["router"])["env"]
    }
    assert env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "valkey", "key": "password"}
    # Kubernetes replaces $(NAME) by variables that stand before it.
    assert list(env).index("REDIS_PASSWORD") < list(env).index("TREESERVE_REDIS_URL")
    assert "TREESERVE_REDIS_URL" not in str(rendered["default"])


# --- Network policies: who may call whom


class Network:
    """What the rendered policies allow between the release's pods, and from and to elsewhere."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self._policies = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"]
        self._pods = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod for pod in pods(manifests)}

    def allows(self, source: str, target: str, port: int, namespace: str = "serving") -> bool:
        """Whether a connection passes; a `source` or `target` that is no role is a foreign pod of `namespace`."""
        return self._side("Egress", source, target, port, namespace) and self._side(
            "Ingress", target, source, port, namespace
        )

    def _side(self, direction: str, pod: str, peer: str, port: int, namespace: str) -> bool:
        if pod not in self._pods:
            return True  # not ours to restrict
        labels = self._pods[pod]["metadata"]["labels"]
        policies = [p for p in self._policies if selects(p["podSelector"]["matchLabels"], labels)]
        policies = [p for p in policies if direction in p["policyTypes"]]
        peers, server = ("from", pod) if direction == "Ingress" else ("to", peer)
        rules = [rule for p in policies for rule in p.get(direction.lower(), [])]
        return not policies or any(
            self._port_matches(rule, server, port) and self._peer_matches(rule.get(peers), peer, namespace)
            for rule in rules
        )

    def _port_matches(self, rule: dict[str, Any], server: str, port: int) -> bool:
        containers = self._pods[server]["spec"]["containers"] if server in self._pods else []
        named = {p["name"]: p["containerPort"] for c in containers for p in c.get("ports", [])}
        return any(named.get(p["port"], p["port"]) == port for p in rule["ports"])

    def _peer_matches(self, peers: list[dict[str, Any]] | None, peer: str, namespace: str) -> bool:
        if not peers:
            return True
        ours = self._pods[peer]["metadata"]["labels"] if peer in self._pods else {}
        foreign = {} if peer in self._pods else {"kubernetes.io/metadata.name": namespace}
        return any(
            selects(p["podSelector"]["matchLabels"], ours)
            if "podSelector" in p
            else selects(p["namespaceSelector"]["matchLabels"], foreign)
            for p in peers
        )


@pytest.mark.parametrize("variant", ["default", "everything"])
def test_the_roles_reach_each_other_and_nothing_else(rendered, variant):
    network = Network(rendered[variant])
    ports = {"router": (50051, 8000), "verifier": (50052, 9102), "speculator": (50053, 9103)}
    allowed = {
        (source, target, port)
        for source in (*ROLES, "test")
        for target in ROLES
        for port in ports[target]
        if network.allows(source, target, port)
    }
    assert allowed == {("router", "verifier", 50052), ("speculator", "verifier", 50052), ("test", "router", 50051)}


def test_strangers_reach_the_router_only(rendered):
    network = Network(rendered["default"])
    assert network.allows("stranger", "router", 50051)
    assert network.allows("stranger", "router", 8000)
    assert not network.allows("stranger", "verifier", 50052)
    assert not network.allows("stranger", "verifier", 9102)
    assert not network.allows("verifier", "stranger", 443)
    assert network.allows("verifier", "stranger", 53)


def test_named_namespaces_close_the_rest(rendered):
    network = Network(rendered["everything"])
    assert network.allows("client", "router", 50051, namespace="apps")
    assert not network.allows("client", "router", 50051, namespace="elsewhere")
    for role, port in (("router", 8000), ("verifier", 9102), ("speculator", 9103)):
        assert network.allows("prometheus", role, port, namespace="monitoring")
        assert not network.allows("prometheus", role, 50052, namespace="monitoring")
    assert network.allows("router", "valkey", 6380, namespace="data")
    assert not network.allows("verifier", "valkey", 6380, namespace="data")
    assert all(network.allows(role, "collector", 4317, namespace="observability") for role in ROLES)


@pytest.mark.parametrize("secured", [{}, {"tls": {"secretName": "certificates"}, "auth": {"keysSecretName": "keys"}}])
def test_keda_reaches_the_port_that_it_asks(render, rendered, secured):
    manifests = render({**VARIANTS["keda"], **secured})
    trigger = of_kind(manifests, "ScaledObject")["verifier"]["spec"]["triggers"][0]
    port = int(trigger["metadata"]["scalerAddress"].rpartition(":")[2])
    config = yaml.safe_load(of_kind(manifests, "ConfigMap")["router"]["data"]["config.yaml"])
    assert config.get("health_listen", config["listen"]).endswith(f":{port}")  # where the router answers it
    network = Network(manifests)
    assert network.allows("keda", "router", port, namespace="keda-system")
    assert not network.allows("stranger", "router", port, namespace="elsewhere")
    assert not network.allows("keda", "router", 8000, namespace="keda-system")
    assert not network.allows("keda", "verifier", 50052, namespace="keda-system")
    assert not Network(rendered["everything"]).allows("keda", "router", port, namespace="keda")  # an HPA asks nobody


def test_who_watches_reaches_the_kubernetes_api(render, rendered):
    def callers(manifests: list[Manifest], port: int) -> set[str]:
        network = Network(manifests)
        return {source for source in (*ROLES, "test") if network.allows(source, "api-server", port, namespace="")}

    assert callers(rendered["watched"], 16443) == {"router", "speculator"}
    assert callers(rendered["watched"], 443) == set()
    usual = render({"discovery": "kubernetes"})
    assert callers(usual, 443) == callers(usual, 6443) == {"router", "speculator"}
    for variant in set(VARIANTS) - {"watched", "open"}:
        assert callers(rendered[variant], 443) == callers(rendered[variant], 6443) == set()


def test_network_policies_can_be_left_out(rendered):
    assert not of_kind(rendered["open"], "NetworkPolicy")
