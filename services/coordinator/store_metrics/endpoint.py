"""Which URL the store's metrics are read from (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.addresses import MAX_PORT, AddressError, bracketed, canonical_host, parse_http
from services.coordinator.store_metrics.settings import StoreMetricsSettings

DEFAULT_PORT = 50090
URL_VARIABLE = "KV_STORE_METRICS_URL"
PORT_VARIABLE = "KV_STORE_METRICS_PORT"
SERVICE_VARIABLE = "KVS_MASTER_SERVICE"


@dataclass(frozen=True, slots=True)
class StoreEndpoint:
    """The chosen URL (None: nothing is collected) and, in words, where it comes from or why there is none.

    wanted: whether the operator asked for metrics, so that their absence is worth a warning.
    """

    url: str | None
    reason: str
    wanted: bool = False


def store_endpoint(settings: StoreMetricsSettings, environment: Mapping[str, str]) -> StoreEndpoint:
    """Choose: explicit URL > configured port > environment > port 50090, equal for every backend."""
    if settings.enabled is False:
        return StoreEndpoint(None, "switched off by coordinator.store_metrics.enabled")
    wanted = bool(settings.enabled or settings.backend or settings.port or settings.service)
    if settings.url is not None:
        return StoreEndpoint(_page(settings.url), "coordinator.store_metrics.url")
    try:
        service = settings.service or _service(environment)
        if settings.port is not None and service is not None:
            return StoreEndpoint(_of(service, settings.port), "coordinator.store_metrics.port")
        if url := environment.get(URL_VARIABLE, "").strip():
            return StoreEndpoint(_page(_checked(URL_VARIABLE, url)), URL_VARIABLE)
        port = _port(environment)
    except ValueError as error:
        return StoreEndpoint(None, str(error), wanted=True)
    if service is None:
        reason = f"no host: set {URL_VARIABLE} or {SERVICE_VARIABLE}, or coordinator.store_metrics.url or .service"
        return StoreEndpoint(None, reason, wanted)
    if port is not None:
        return StoreEndpoint(_of(service, port), PORT_VARIABLE)
    return StoreEndpoint(_of(service, DEFAULT_PORT), f"default port {DEFAULT_PORT}")


def _service(environment: Mapping[str, str]) -> str | None:
    text = environment.get(SERVICE_VARIABLE, "").strip()
    if not text:
        return None
    try:
        host = canonical_host(text)
    except AddressError as error:
        raise ValueError(f"{SERVICE_VARIABLE}: {error}") from None
    if host == "*":
        raise ValueError(f"{SERVICE_VARIABLE}: {text!r} is an address to listen on, give the store's host")
    return host


def _port(environment: Mapping[str, str]) -> int | None:
    text = environment.get(PORT_VARIABLE, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_PORT:
        raise ValueError(f"{PORT_VARIABLE}: {text[:20]!r} is no port from 1 to {MAX_PORT}")
    return int(text)


def _checked(variable: str, url: str) -> str:
    try:
        return parse_http(url)
    except AddressError as error:
        raise ValueError(f"{variable}: {error}") from None


def _of(host: str, port: int) -> str:
    return f"http://{bracketed(host)}:{port}/metrics"


def _page(url: str) -> str:
    """A URL that names only the server means its ``/metrics``."""
    return url if "/" in url.split("://", 1)[1] else f"{url}/metrics"
