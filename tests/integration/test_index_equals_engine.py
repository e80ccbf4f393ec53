"""Codec, canonical events, reconciliation and index in one process: they promise what real engines really had cached.

The same captures go through all services and sockets in tests/e2e/test_engine_captures.py; this variant takes a second.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.blocks import Tier, content_hashes, namespace_root, prefix_keys, token_bytes
from schemas.events import WIRE_VERSION, EventBatch, IndexBatch
from schemas.registry import EngineRecord, StoreBackend
from schemas.wire import vllm
from schemas.wire.frames import parse_live
from services.ingest.canonical import canonicalise
from services.ingest.registrations import publishers_of
from services.matcher import state
from services.matcher.confirmation import finish
from services.matcher.memory_store import MemoryStore
from services.matcher.reconcile import plan
from services.matcher.settings import MatcherSettings
from services.router.index import create_index
from services.router.index.port import Coverage
from services.router.spaces import Spaces
from services.runtime.registry_store import Registry
from tests.captures import engine_capture, engine_capture_names

MODEL, TENANT, NOW_MS = "m", "default", 1_000
Message = dict[str, Any]


def has_own_cpu_tier(name: str) -> bool:
    """Whether the engine ran vLLM's OffloadingConnector; otherwise its CPU events speak of a pool."""
    return "offload" in name


@dataclass
class Pipeline:
    """The pure cores of all services, one after the other, for one engine."""

    record: EngineRecord
    remembers: bool
    spaces: Spaces = field(default_factory=lambda: Spaces(lambda: create_index("plain", 10_000, 1_000)))
    store: MemoryStore = field(default_factory=lambda: MemoryStore(MatcherSettings()))
    sequence: int = 0

    def __post_init__(self) -> None:
        self.spaces.set_registry(Registry(engines={(self.record.instance_id, self.record.dp_rank): self.record}))

    async def receive(self, frames: list[bytes]) -> None:
        message = parse_live(frames)
        canonical = canonicalise(vllm.decode(message.payload).events, publishers_of(self.record)[0])
        assert canonical.rejected == []
        self.sequence += 1
        batch = EventBatch(
            version=WIRE_VERSION,
            source="engine",
            model=MODEL,
            tenant=TENANT,
            instance_id=self.record.instance_id,
            dp_rank=0,
            generation=self.record.generation,
            first_seq=message.seq,
            last_seq=message.seq,
            published_at=0.0,
            received_at=0.0,
            events=canonical.events,
            own_tiers=self.record.own_tiers,
            counted=self.record.counted,
            pool_expected=self.remembers,
        )
        for space, steps in plan(batch).items():
            asked = [state.Message(self.sequence, steps.operations())]
            answer = (await self.store.apply(space, 1, 1, asked, NOW_MS)).answers[self.sequence]
            assert answer is not None
            group, _ = finish(batch, self.sequence, steps, answer.results)
            for _ in self.spaces.apply(IndexBatch(WIRE_VERSION, *space, [group])):
                pass

    def coverage(self, tokens: list[int], cache_salt: str | None) -> Coverage:
        size = self.record.block_size
        usable = content_hashes(token_bytes(tokens), size)[: (len(tokens) - 1) // size]
        space = self.spaces.find(MODEL, TENANT)
        assert space is not None
        keys = prefix_keys(usable, namespace_root(cache_salt=cache_salt)).tobytes()
        return space.index.match(keys, space.candidates, space.pool_holders)[0]


@pytest.mark.parametrize("name", engine_capture_names())
async def test_the_matched_prefix_equals_the_engines_cached_tokens_for_every_prompt(name: str) -> None:
    capture = engine_capture(name)
    own_tiers = (Tier.CPU,) if has_own_cpu_tier(name) else ()
    record = EngineRecord(
        instance_id="e",
        model=MODEL,
        block_size=capture["block_size"],
        endpoints={Tier.NPU: "tcp://127.0.0.1:5557"},
        own_tiers=own_tiers,
        store_backend=StoreBackend.NONE if own_tiers else StoreBackend.MEMCACHE,
        generation=1,
    )
    pipeline = Pipeline(record, remembers=True)
    live: list[Message] = list(capture["live"])
    promised, actual = [], []
    for prompt in capture["prompts"]:
        coverage = pipeline.coverage(prompt["prompt_token_ids"], prompt.get("cache_salt"))
        promised.append((prompt["phase"], sum(coverage) * record.block_size))
        actual.append((prompt["phase"], prompt["num_cached_tokens"]))
        while live and live[0]["phase"] == prompt["phase"]:
            await pipeline.receive([bytes.fromhex(frame) for frame in live.pop(0)["frames_hex"]])
        space = pipeline.spaces.find(MODEL, TENANT)
        assert space is not None
        assert space.index.audit() == []
    assert live == []
    assert promised == actual


def test_there_are_captures_of_every_kind_of_run() -> None:
    names = engine_capture_names()
    assert len(names) >= 27
    for kind in ("plain", "offload", "multi-offload", "multi-worker_plugin", "bytes_sha256"):
        assert any(name.endswith(kind) for name in names), kind
