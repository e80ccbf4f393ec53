"""The Kubernetes base renders, validates, and says the same as compose.yaml."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
KUBERNETES_VERSIONS = ["1.29", "1.33"]
SERVICES = ["ingest", "matcher", "router", "coordinator"]


def render(folder: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl") or pytest.skip("kubectl is not installed")
    result = subprocess.run(
        [kubectl, "kustomize", str(ROOT / folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


@pytest.fixture(scope="module")
def base() -> list[dict[str, Any]]:
    return render("deploy/k8s/base")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return document


def workload(base: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [
        item for item in base if item["kind"] in {"Deployment", "StatefulSet"} and item["metadata"]["name"] == name
    ]
    return found


def container(base: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = workload(base, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def service_ports(base: list[dict[str, Any]], name: str) -> set[int]:
    (found,) = [item for item in base if item["kind"] == "Service" and item["metadata"]["name"] == name]
    return {port["port"] for port in found["spec"]["ports"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("folder", ["deploy/k8s/base", "deploy/k8s/examples/engine"])
def test_manifests_render_and_validate_against_the_kubernetes_schema(folder: str, version: str) -> None:
    manifests = render(folder)
    assert manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", [*SERVICES, "nats", "redis"])
def test_every_container_is_locked_down_and_has_probes_and_resources(base: list[dict[str, Any]], name: str) -> None:
    pod = workload(base, name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    security = container(base, name)["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert {"livenessProbe", "readinessProbe"} <= container(base, name).keys()
    assert container(base, name)["resources"]["limits"]["memory"]
    assert container(base, name)["resources"]["requests"].keys() == {"cpu", "memory"}


def test_the_pools_service_exposes_kv_events_and_metrics(base: list[dict[str, Any]]) -> None:
    assert {5557, 50090} <= service_ports(base, "kvs-master")


def test_every_pod_port_that_a_service_offers_is_open_to_someone_and_the_rest_is_closed(
    base: list[dict[str, Any]],
) -> None:
    policies = [item["spec"] for item in base if item["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in policies
    opened = {
        port["port"] for policy in policies for rule in policy.get("ingress", ()) for port in rule.get("ports", ())
    }
    assert opened == {4222, 6379, 8222, 13331, 13332, 13333, 1025, 1026, 1027, 5557, 50088, 50089, 50090}


def test_an_engine_gets_its_pod_ip_as_backend_id_without_losing_its_own_environment() -> None:
    manifests = render("deploy/k8s/examples/engine")
    (engine,) = [item for item in manifests if item["kind"] == "Deployment"]
    pod = engine["spec"]["template"]["spec"]
    environment = {item["name"]: item for item in pod["containers"][0]["env"]}
    assert environment["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert environment["MMC_LOCAL_SERVICE_BACKEND_ID"]["value"] == "$(POD_IP)"
    assert list(environment).index("POD_IP") < list(environment).index("MMC_LOCAL_SERVICE_BACKEND_ID")
    assert environment["PYTHONHASHSEED"]["value"] == "0"
    (config_map,) = [item for item in manifests if item["kind"] == "ConfigMap"]
    assert "backend_id = @POD_IP@" in config_map["data"]["mmc-local.conf"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["local-service-template"]["configMap"]["name"] == config_map["metadata"]["name"]


def compose_ports(service: dict[str, Any]) -> set[int]:
    return {int(str(port).rsplit(":", 1)[1]) for port in service.get("ports", ())}


def probe_port(service: dict[str, Any]) -> int:
    return int(service["healthcheck"]["test"][-1].rsplit(":", 1)[1].split("/")[0])


@pytest.mark.parametrize("name", SERVICES)
def test_compose_and_kustomize_agree_on_ports_commands_and_environment_names(
    base: list[dict[str, Any]], compose: dict[str, Any], name: str
) -> None:
    kubernetes, composed = container(base, name), compose["services"][name]
    ports = {port["containerPort"] for port in kubernetes["ports"]}
    assert ports == service_ports(base, name)
    assert compose_ports(composed) <= ports
    assert probe_port(composed) in ports
    assert kubernetes["args"] == composed["command"]
    assert kubernetes["readinessProbe"]["httpGet"]["path"] == "/readyz"
    own = {"POD_IP", "KVROUTE_CONFIG"}
    only_compose = {"KVROUTE_LOGGING__FORMAT", "KVROUTE_LOGGING__LEVEL", "KVROUTE_REDIS__URL", "KVS_MASTER_SERVICE"}
    names = {item["name"] for item in kubernetes["env"]} - own
    assert names <= composed["environment"].keys()
    assert composed["environment"].keys() - names <= only_compose | {"KV_STORE_METRICS_URL"}
    for item in kubernetes["env"]:
        if item["name"].startswith("KVROUTE_") and item["name"] != "KVROUTE_CONFIG":
            assert item["value"] == composed["environment"][item["name"]]


@pytest.mark.parametrize("name", ["nats", "redis", *SERVICES])
def test_compose_and_kustomize_run_the_same_images(
    base: list[dict[str, Any]], compose: dict[str, Any], name: str
) -> None:
    default = compose["services"][name]["image"].partition(":-")[2].rstrip("}")
    assert container(base, name)["image"] == default
    assert not default.endswith(":latest")
    assert ":" in default


@pytest.mark.parametrize("name", ["nats", "redis"])
def test_compose_and_kustomize_start_nats_and_redis_with_the_same_arguments(
    base: list[dict[str, Any]], compose: dict[str, Any], name: str
) -> None:
    assert container(base, name)["args"] == compose["services"][name]["command"]


@pytest.mark.parametrize("name", [*SERVICES, "nats", "redis", "volumes"])
def test_compose_services_are_restricted(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["mem_limit"]
    assert service["cpus"]
    if name != "volumes":
        assert service["user"] == "10001:10001"
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"]
