"""POST /events: bodies become index batches; a bad event costs itself only."""

from typing import Any

import pytest

from schemas.blocks import Tier, content_hashes, namespace_root, pack_hashes, token_bytes, unpack_hashes
from schemas.events import IndexBatch, IndexCleared, IndexEvent, IndexRemoved, IndexStored, Worker, encode
from schemas.registry import EngineRecord, RetiredRecord
from services.router.encodings import BodyRefusedError
from services.router.index.plain import PlainIndex
from services.router.message_parts import MAX_BLOCKS, MAX_BYTES, parts_of
from services.router.posted_events import MAX_ERRORS, Posted, read_posted_events
from services.router.spaces import Spaces
from services.runtime.registry_store import Registry

BLOCK = 4
WORKER = Worker("i", 0)
TOKENS = list(range(1, 9))
CONTENTS = content_hashes(token_bytes(TOKENS), BLOCK).tobytes()
STORED = {"event_id": 1, "event_type": "stored", "block_hashes": [11, 12], "token_ids": TOKENS, "block_size": BLOCK}
ENGINE = EngineRecord(instance_id="i", model="m", block_size=BLOCK, generation=10)


class Router:
    """A router's view: one engine registered, or what the test says."""

    def __init__(self, *records: EngineRecord, retired: tuple[RetiredRecord, ...] = ()) -> None:
        self.spaces = Spaces(PlainIndex)
        self.spaces.set_registry(Registry({(r.instance_id, r.dp_rank): r for r in records}, {}, retired))

    def read(self, *events: object, **body: Any) -> Posted:
        fields = {"instance_id": "i", "events": list(events)} | body
        return read_posted_events(fields, self.spaces.registry.engines, self.spaces.publishers, now=1.0)

    def apply(self, posted: Posted) -> None:
        for batch in posted.batches:
            for part in parts_of(batch):
                for _ in self.spaces.apply(part):
                    pass

    def held(self, model: str = "m") -> tuple[int, ...]:
        space = self.spaces.find(model, "default")
        return space.blocks_of(WORKER)[:3] if space is not None else (0, 0, 0)


def events_of(posted: Posted) -> list[IndexEvent]:
    return [event for batch in posted.batches for group in batch.groups for event in group.events]


def only_event(*events: object, **body: Any) -> IndexEvent:
    posted = Router(ENGINE).read(*events, **body)
    assert posted.errors == ()
    (event,) = events_of(posted)
    return event


def test_tokens_become_content_hashes() -> None:
    event = only_event(STORED)
    assert event == IndexStored(WORKER, Tier.NPU, pack_hashes([11, 12]), None, CONTENTS, 0, BLOCK)


def test_blocks_with_their_own_hashes_are_taken_as_they_are() -> None:
    blocks = [{"block_hash": 11, "tokens_hash": 5}, {"block_hash": -1, "tokens_hash": 6}]
    event = only_event(
        {"event_id": 1, "data": {"type": "BlockStored", "blocks": blocks, "medium": "CPU", "parent_hash": 3}}
    )
    assert event == IndexStored(WORKER, Tier.CPU, pack_hashes([11, 2**64 - 1]), 3, pack_hashes([5, 6]))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"event_type": "removed", "seq_hashes": [1]}, IndexRemoved(WORKER, Tier.NPU, pack_hashes([1]))),
        (
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "ssd"},
            IndexRemoved(WORKER, Tier.DISK, pack_hashes([1])),
        ),
        ({"event_type": "cleared", "medium": "cpu"}, IndexCleared(WORKER, (Tier.CPU,))),
        ({"event_type": "cleared"}, IndexCleared(WORKER, (Tier.NPU, Tier.CPU, Tier.DISK))),
        ({"type": "AllBlocksCleared"}, IndexCleared(WORKER, (Tier.NPU,))),
    ],
)
def test_removals_and_clears(event: dict[str, Any], expected: IndexEvent) -> None:
    assert only_event({"event_id": 1} | event) == expected


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"event_type": "flushed"}, "flushed"),
        ({"event_type": None}, "event_type"),
        ({"event_id": None}, "event_id"),
        ({"medium": "tape"}, "tape"),
        ({"block_hashes": []}, "block hashes"),
        ({"block_hashes": ["x", 1]}, "block_hashes"),
        ({"block_hashes": [11, 12, 13]}, "3 block hashes but content for 2"),
        ({"token_ids": []}, "content is missing"),
        ({"token_ids": [1, "x"]}, "token_ids"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 8}, "block_size 8 in the event, 4 in the registration"),
        ({"parent_hash": "x"}, "parent_hash"),
        ({"lora_id": "x"}, "lora_id"),
        ({"lora_name": 5}, "lora_name"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": "0"}, "dp_rank"),
        ({"blocks": [{"block_hash": 1}]}, "tokens_hash"),
        ({"blocks": [5]}, "block_hash"),
        ({"event_type": "x" * 10_000}, "event_type"),
    ],
)
def test_t15_a_bad_event_is_an_error_and_the_others_are_applied(changes: dict[str, Any], word: str) -> None:
    router = Router(ENGINE)
    posted = router.read(STORED | changes, STORED)
    assert posted.applied == 1
    (error,) = posted.errors
    assert word in error
    assert error.startswith("dp_rank=0: ")
    assert len(error) < 300
    router.apply(posted)
    assert router.held() == (2, 0, 0)


def test_ex_03_one_hash_twice_or_a_block_that_is_its_own_parent_is_an_error_and_clears_nothing() -> None:
    router = Router(ENGINE)
    router.apply(router.read(STORED))
    posted = router.read(
        STORED | {"block_hashes": [13, 13], "parent_hash": 12}, STORED | {"block_hashes": [12, 13], "parent_hash": 12}
    )
    assert (posted.applied, len(posted.errors), posted.batches) == (0, 2, ())
    assert router.held() == (2, 0, 0)


def test_ha_05_the_namespace_is_what_the_event_names_or_its_engine_is_registered_with() -> None:
    adapter = ENGINE.model_copy(update={"lora_name": "ad", "additional_salt": "salt"})

    def root(engine: EngineRecord, **changes: Any) -> int:
        (event,) = events_of(Router(engine).read(STORED | changes))
        assert isinstance(event, IndexStored)
        return event.root

    assert root(ENGINE) == 0
    assert root(ENGINE, lora_name="ad", cache_salt="s") == namespace_root("ad", "s")
    assert root(adapter) == namespace_root("ad", extra_keys=("salt",))
    assert root(adapter, lora_name="other", additional_salt="x") == namespace_root("other", extra_keys=("x",))
    assert root(adapter, lora_id=7) == namespace_root(lora_id=7, extra_keys=("salt",))


def test_events_are_grouped_by_rank_and_carry_the_registrations_generation() -> None:
    second = ENGINE.model_copy(update={"dp_rank": 1, "generation": 20})
    posted = Router(ENGINE, second).read(STORED | {"dp_rank": 1}, STORED, STORED | {"dp_rank": 1})
    (batch,) = posted.batches
    assert [(group.dp_rank, group.generation, len(group.events)) for group in batch.groups] == [(0, 10, 1), (1, 20, 2)]
    assert (batch.model, batch.tenant, posted.applied) == ("m", "default", 3)


def test_an_unknown_instance_needs_the_models_name() -> None:
    router = Router()
    posted = router.read(STORED)
    assert posted.errors == ("dp_rank=0: instance i not found; register it or give model_name",)
    assert router.read(STORED, model_name="other", tenant_id="t").batches[0].model == "other"


def test_what_was_posted_before_the_registration_survives_it() -> None:
    router = Router()
    router.apply(router.read(STORED, model_name="m"))
    router.spaces.set_registry(Registry({("i", 0): ENGINE}))
    assert router.held() == (2, 0, 0)


def test_sq_06_what_is_posted_after_an_unregistration_is_kept_for_no_later_life() -> None:
    tombstone = RetiredRecord(retired_kind="engine", instance_id="i", model="m", generation=30)
    router = Router(retired=(tombstone,))
    router.apply(router.read(STORED, model_name="m"))
    assert router.held() == (2, 0, 0)
    router.spaces.set_registry(Registry({("i", 0): ENGINE.model_copy(update={"generation": 40})}))
    assert router.held() == (0, 0, 0)


def test_what_ingest_learnt_of_a_restart_counts_for_posted_events_too() -> None:
    router = Router(ENGINE)
    first = router.read(STORED).batches[0]
    restarted = IndexBatch(1, "m", "default", [group_with_generation(first, 15)])
    for _ in router.spaces.apply(restarted):
        pass
    assert router.read(STORED).batches[0].groups[0].generation == 15


def group_with_generation(batch: IndexBatch, generation: int) -> Any:
    import msgspec

    return msgspec.structs.replace(batch.groups[0], generation=generation)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"instance_id": None}, 422, "instance_id"),
        ({"instance_id": 5}, 422, "instance_id"),
        ({"events": {}}, 422, "events"),
        ({"model_name": 5}, 422, "model_name"),
        ({"tenant_id": "x" * 600}, 422, "tenant_id"),
        ({"events": [0] * 65_537}, 413, "65537"),
    ],
)
def test_a_body_without_instance_or_list_is_refused_as_a_whole(body: dict[str, Any], status: int, word: str) -> None:
    with pytest.raises(BodyRefusedError, match=word) as refusal:
        Router(ENGINE).read(STORED, **body)
    assert refusal.value.status == status


def test_an_empty_list_is_legal_and_errors_are_limited() -> None:
    assert Router(ENGINE).read() == Posted((), 0, ())
    posted = Router(ENGINE).read(*["text"] * (MAX_ERRORS + 5))
    assert len(posted.errors) == MAX_ERRORS + 1
    assert posted.errors[-1] == "and 5 more"


def test_long_chains_are_cut_into_messages_that_nats_takes_and_mean_the_same() -> None:
    router = Router(ENGINE)
    blocks = 2 * MAX_BLOCKS + 5
    tokens = [token % 50_000 for token in range(blocks * BLOCK)]
    posted = router.read(STORED | {"block_hashes": list(range(1, blocks + 1)), "token_ids": tokens}, *[STORED] * 30)
    parts = [part for batch in posted.batches for part in parts_of(batch)]
    assert len(parts) >= 2
    assert max(len(encode(part)) for part in parts) < MAX_BYTES + 64 * 1024
    router.apply(posted)
    assert router.held()[0] >= blocks
    removal = router.read({"event_id": 1, "event_type": "removed", "block_hashes": list(range(1, blocks + 1))})
    names = [h for batch in removal.batches for part in parts_of(batch) for h in names_of(part)]
    assert names == list(range(1, blocks + 1))


def names_of(part: IndexBatch) -> list[int]:
    return [
        name
        for group in part.groups
        for event in group.events
        if not isinstance(event, IndexCleared)
        for name in unpack_hashes(event.engine_hashes)
    ]
