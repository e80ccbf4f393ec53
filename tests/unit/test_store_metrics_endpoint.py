"""Which URL the store's metrics are read from: one order of precedence for every backend."""

import pytest
from pydantic import ValidationError

from services.coordinator.store_metrics.endpoint import store_endpoint
from services.coordinator.store_metrics.settings import StoreMetricsSettings

ENVIRONMENT = {
    "KV_STORE_METRICS_URL": "http://from-environment:1/metrics",
    "KVS_MASTER_SERVICE": "kvs-master",
    "KV_STORE_METRICS_PORT": "2",
}


def url(environment: dict[str, str], **settings: object) -> str | None:
    return store_endpoint(StoreMetricsSettings(**settings), environment).url  # type: ignore[arg-type]


def test_an_explicit_url_wins_over_everything() -> None:
    assert url(ENVIRONMENT, url="http://explicit:9/m", port=3) == "http://explicit:9/m"


def test_a_configured_port_wins_over_the_environment() -> None:
    assert url(ENVIRONMENT, port=3) == "http://kvs-master:3/metrics"
    assert url(ENVIRONMENT, port=3, service="other") == "http://other:3/metrics"


def test_the_environments_url_wins_over_its_service_and_port() -> None:
    assert url(ENVIRONMENT) == "http://from-environment:1/metrics"


def test_the_environments_port_wins_over_the_default() -> None:
    assert url({**ENVIRONMENT, "KV_STORE_METRICS_URL": ""}) == "http://kvs-master:2/metrics"


@pytest.mark.parametrize("backend", ["memcache", "Memcache", "MOONCAKE", "mooncake", None])
def test_the_default_port_is_50090_for_every_backend(backend: str | None) -> None:
    assert url({"KVS_MASTER_SERVICE": "kvs-master"}, backend=backend) == "http://kvs-master:50090/metrics"


@pytest.mark.parametrize("service", ["fd00::9", "[fd00::9]", "FD00:0::9"])
def test_ipv6_hosts_stand_in_brackets(service: str) -> None:
    assert url({"KVS_MASTER_SERVICE": service}) == "http://[fd00::9]:50090/metrics"
    assert url({}, service=service, port=1) == "http://[fd00::9]:1/metrics"
    assert url({}, url="http://[fd00::9]:1") == "http://[fd00::9]:1/metrics"


def test_enabled_false_is_off_whatever_else_is_set() -> None:
    endpoint = store_endpoint(StoreMetricsSettings(enabled=False, url="http://explicit:9", port=3), ENVIRONMENT)
    assert (endpoint.url, endpoint.wanted) == (None, False)


def test_without_a_host_there_is_none_and_the_reason_names_what_to_set() -> None:
    endpoint = store_endpoint(StoreMetricsSettings(enabled=True), {})
    assert (endpoint.url, endpoint.wanted) == (None, True)
    assert "KV_STORE_METRICS_URL" in endpoint.reason
    assert not store_endpoint(StoreMetricsSettings(), {}).wanted


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KV_STORE_METRICS_PORT", "0"),
        ("KV_STORE_METRICS_PORT", "http"),
        ("KV_STORE_METRICS_PORT", "99999999999999999999"),
        ("KV_STORE_METRICS_URL", "kvs-master:50090"),
        ("KVS_MASTER_SERVICE", "0.0.0.0"),
        ("KVS_MASTER_SERVICE", "bad host"),
    ],
)
def test_a_bad_environment_variable_is_named(variable: str, value: str) -> None:
    endpoint = store_endpoint(StoreMetricsSettings(), {"KVS_MASTER_SERVICE": "kvs-master", variable: value})
    assert endpoint.url is None
    assert variable in endpoint.reason
    assert endpoint.wanted


@pytest.mark.parametrize(
    "settings", [{"backend": "redis"}, {"url": "kvs:1"}, {"service": "*"}, {"port": 0}, {"prot": 1}]
)
def test_bad_settings_are_refused_at_start(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StoreMetricsSettings.model_validate(settings)
