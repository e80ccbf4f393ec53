"""Waiting until services are ready, and why they are not."""

import asyncio
from collections.abc import Mapping

import httpx

POLL_SECONDS = 0.05


async def wait_ready(client: httpx.AsyncClient, service: str, url: str, reasons: dict[str, str]) -> None:
    """Wait until the service itself says that it is ready; meanwhile `reasons[service]` is current."""
    while (reason := await unready_reason(client, service, url)) is not None:
        reasons[service] = reason
        await asyncio.sleep(POLL_SECONDS)
    reasons.pop(service, None)


async def unready_reason(client: httpx.AsyncClient, service: str, url: str) -> str | None:
    """Why a service is not ready, None when it is."""
    try:
        response = await client.get(url)
        report = response.json()
    except httpx.HTTPError:
        return "does not answer yet"
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("service") != service:
        return f"something else answers at {url}"
    if response.status_code == 200:
        return None
    return "; ".join(_failing(report.get("conditions"))) or "is stopping"


def _failing(conditions: object) -> list[str]:
    if not isinstance(conditions, Mapping):
        return []
    return [
        f"{name}: {condition.get('reason') or 'not yet'}"
        for name, condition in conditions.items()
        if isinstance(condition, Mapping) and not condition.get("ok")
    ]
