"""Asks who holds a prompt's prefix: the engine's /tokenize for the tokens, the router's /query for the holders."""

import asyncio
import random
from array import array
from collections.abc import Sequence
from typing import Any

import httpx
import msgpack
import orjson

from services.coordinator.frontdoor import metrics
from services.coordinator.frontdoor.choice import Target
from services.coordinator.frontdoor.load import Worker
from services.coordinator.frontdoor.prompts import Prompt
from services.coordinator.frontdoor.settings import FrontDoorSettings
from services.runtime.logging import RateLimited, get_logger

TOKENIZE_ATTEMPTS = 2

log = get_logger("front_door")


class PrefixUnknownError(Exception):
    """Nothing is known about the prefix; `reason` is one of a fixed set, for the metric."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class PrefixLookup:
    """Never raises for what engines and router do: without an answer a request is placed by load alone."""

    def __init__(self, client: httpx.AsyncClient, settings: FrontDoorSettings) -> None:
        self._client = client
        self._settings = settings
        self._limited = RateLimited()

    async def matched_tokens(self, prompt: Prompt, targets: Sequence[Target], tenant: str) -> dict[Worker, int]:
        """Tokens of the prompt that each worker has cached; empty when nobody knows (counted by reason)."""
        try:
            if prompt.without_prefix:
                raise PrefixUnknownError(prompt.without_prefix)
            tokens = prompt.tokens if prompt.tokens is not None else await self._tokenize(prompt, targets)
            sizes = {target.record.block_size for target in targets}
            if len(tokens) // 4 < min(sizes):
                raise PrefixUnknownError("shorter_than_block")
            found: dict[Worker, int] = {}
            for answer in await asyncio.gather(
                *(self._query(prompt, targets[0], tokens, size, tenant) for size in sizes)
            ):
                for worker, matched in answer.items():
                    found[worker] = max(found.get(worker, 0), matched)
        except PrefixUnknownError as error:
            metrics.WITHOUT_PREFIX.labels(error.reason).inc()
            held_back = self._limited.allow(error.reason)
            if held_back is not None and error.reason in metrics.FAULTS:
                log.warning("placed_without_prefix", reason=error.reason, detail=str(error), repeated=held_back)
            return {}
        return found

    async def _tokenize(self, prompt: Prompt, targets: Sequence[Target]) -> bytes:
        urls = sorted({target.url for target in targets})
        failure = PrefixUnknownError("tokenize_failed")
        for url in random.sample(urls, min(TOKENIZE_ATTEMPTS, len(urls))):
            try:
                return await self._tokenize_at(f"{url}/tokenize", prompt)
            except PrefixUnknownError as error:
                failure = error
        raise failure

    async def _tokenize_at(self, url: str, prompt: Prompt) -> bytes:
        try:
            async with asyncio.timeout(self._settings.tokenize_timeout):
                response = await self._client.post(url, content=orjson.dumps(prompt.to_tokenize), headers=_JSON)
            if response.status_code != httpx.codes.OK:
                raise PrefixUnknownError("tokenize_refused", f"{url} answered {response.status_code}")
            return array("I", orjson.loads(response.content)["tokens"]).tobytes()
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PrefixUnknownError("tokenize_failed", f"{url}: {str(error) or type(error).__name__}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError, OverflowError) as error:
            raise PrefixUnknownError("tokenize_failed", f"{url}: answered no token ids") from error

    async def _query(
        self, prompt: Prompt, target: Target, tokens: bytes, block_size: int, tenant: str
    ) -> dict[Worker, int]:
        query: dict[str, Any] = {
            "model": target.record.model,
            "tenant_id": tenant,
            "block_size": block_size,
            "token_ids": tokens,
        }
        if target.record.lora_name:
            query["lora_name"] = target.record.lora_name
        if prompt.cache_salt:
            query["cache_salt"] = prompt.cache_salt
        url = f"{self._settings.router_url}/query"
        try:
            async with asyncio.timeout(self._settings.query_timeout):
                response = await self._client.post(url, content=msgpack.packb(query), headers=_MSGPACK)
            if response.status_code == httpx.codes.NOT_FOUND:
                return {}
            if response.status_code != httpx.codes.OK:
                raise PrefixUnknownError("query_refused", f"{url} answered {response.status_code}")
            instances = msgpack.unpackb(response.content).get(tenant, {})
            return {
                Worker(instance_id, int(rank)): int(counts["matched_tokens"])
                for instance_id, instance in instances.items()
                for rank, counts in instance["DP"].items()
            }
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PrefixUnknownError("query_failed", f"{url}: {str(error) or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise PrefixUnknownError("query_failed", f"{url}: answered in an unknown form") from error


_JSON = {"Content-Type": "application/json"}
_MSGPACK = {"Content-Type": "application/msgpack"}
