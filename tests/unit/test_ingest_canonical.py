"""Wire events become canonical events; tokens become content hashes."""

from array import array
from typing import Any

import pytest

from schemas.blocks import (
    PLAIN_ROOT,
    Tier,
    content_hashes,
    fold_block_extra,
    namespace_root,
    pack_hashes,
    token_bytes,
    unpack_hashes,
)
from schemas.events import Cleared, Removed, Stored
from schemas.registry import EngineRecord, PoolRecord
from schemas.wire.types import RejectReason, WireCleared, WireRemoved, WireStored
from services.ingest.canonical import canonicalise
from services.ingest.registrations import Publisher, publishers_of


def engine(**fields: Any) -> Publisher:
    values = {"instance_id": "a", "model": "m", "block_size": 4, "endpoints": {Tier.NPU: "tcp://10.0.0.5:5557"}}
    return publishers_of(EngineRecord.model_validate({**values, **fields}))[0]


def pool(**fields: Any) -> Publisher:
    values = {"instance_id": "pool", "model": "m", "block_size": 4, "endpoint": "tcp://10.0.0.9:5557"}
    return publishers_of(PoolRecord.model_validate({**values, **fields}))[0]


def node_pool_socket() -> Publisher:
    endpoints = {Tier.NPU: "tcp://10.0.0.5:5557", Tier.CPU: "tcp://10.0.0.5:31501", Tier.DISK: "tcp://10.0.0.5:31501"}
    return publishers_of(
        EngineRecord(instance_id="a", model="m", block_size=4, endpoints=endpoints, store_backend="YuanRong")
    )[1]


TOKENS = array("I", range(1, 9))
PLAIN = WireStored(hashes=(11, 12), parent=10, token_ids=TOKENS, block_size=4, tier=Tier.NPU)


def only(publisher: Publisher, event: WireStored | WireRemoved | WireCleared) -> Stored | Removed | Cleared:
    result = canonicalise((event,), publisher)
    assert (result.accepted, result.rejected, len(result.events)) == (1, [], 1)
    return result.events[0]


def refused(publisher: Publisher, event: WireStored | WireRemoved | WireCleared) -> RejectReason:
    result = canonicalise((event,), publisher)
    assert (result.accepted, result.events) == (0, [])
    assert result.rejected[0].position == 0
    return result.rejected[0].reason


def test_tokens_become_content_hashes_and_the_rest_is_carried() -> None:
    event = only(engine(), PLAIN)
    assert event == Stored(
        tier=Tier.NPU,
        engine_hashes=pack_hashes((11, 12)),
        parent=10,
        content_hashes=content_hashes(token_bytes(TOKENS), 4).tobytes(),
        root=PLAIN_ROOT,
        block_size=4,
    )


def test_content_hashes_are_the_check_vectors_of_the_replaced_service() -> None:
    event = only(engine(), PLAIN)
    assert isinstance(event, Stored)
    assert list(unpack_hashes(event.content_hashes)) == [14643705804678351452, 16777012769546811212]


@pytest.mark.parametrize(
    ("event_fields", "record_fields", "root"),
    [
        ({"lora_name": "x"}, {}, namespace_root(lora_name="x")),
        ({"cache_salt": "x"}, {}, namespace_root(cache_salt="x")),
        ({"lora_id": 7}, {}, namespace_root(lora_id=7)),
        ({"lora_id": 7, "lora_name": "x"}, {}, namespace_root(lora_name="x")),
        ({}, {"lora_name": "x"}, namespace_root(lora_name="x")),
        ({"lora_name": "y"}, {"lora_name": "x"}, namespace_root(lora_name="y")),
        ({"lora_id": 7}, {"lora_name": "x"}, namespace_root(lora_id=7)),
        ({}, {"additional_salt": "s"}, namespace_root(extra_keys=("s",))),
        ({"cache_salt": "c"}, {"additional_salt": "s"}, namespace_root(cache_salt="c", extra_keys=("s",))),
    ],
)
def test_ha_04_lora_salt_and_registered_salt_each_make_their_own_namespace(
    event_fields: dict[str, Any], record_fields: dict[str, Any], root: int
) -> None:
    event = only(engine(**record_fields), WireStored(hashes=(11, 12), token_ids=TOKENS, block_size=4, **event_fields))
    assert isinstance(event, Stored)
    assert event.root == root != PLAIN_ROOT


def test_t29_image_keys_fold_into_the_block_that_carries_them_alone() -> None:
    event = only(engine(), WireStored(hashes=(11, 12), token_ids=TOKENS, block_size=4, block_keys=((), ("image-1",))))
    assert isinstance(event, Stored)
    plain = content_hashes(token_bytes(TOKENS), 4)
    assert list(unpack_hashes(event.content_hashes)) == [plain[0], fold_block_extra(plain[1], ("image-1",))]


def test_ev_02_an_engine_event_without_a_medium_is_about_the_npu() -> None:
    store = only(engine(), WireStored(hashes=(1,), token_ids=TOKENS[:4], block_size=4))
    removal = only(engine(), WireRemoved(hashes=(1,)))
    assert isinstance(store, Stored)
    assert isinstance(removal, Removed)
    assert store.tier is removal.tier is Tier.NPU


def test_bs_01_a_disagreeing_block_size_is_refused_with_both_sizes() -> None:
    result = canonicalise((WireStored(hashes=(1,), token_ids=TOKENS, block_size=8), PLAIN), engine())
    assert [refusal.reason for refusal in result.rejected] == [RejectReason.BLOCK_SIZE_MISMATCH]
    assert "8" in result.rejected[0].detail
    assert "4" in result.rejected[0].detail
    assert result.block_size_seen == 8
    assert (result.accepted, len(result.events)) == (1, 1), "the rest of the batch is applied"


def test_bs_02_stores_of_another_size_are_refused_while_removals_pass() -> None:
    assert refused(engine(), WireStored(hashes=(1,), token_ids=TOKENS, block_size=8)) is (
        RejectReason.BLOCK_SIZE_MISMATCH
    )
    assert isinstance(only(engine(), WireRemoved(hashes=(1,))), Removed)


def test_po_06_a_pool_object_of_another_size_proves_nothing() -> None:
    event = WireStored(hashes=(88,), token_ids=TOKENS, block_size=8, tier=Tier.CPU, backend_id="node")
    assert refused(pool(), event) is RejectReason.BLOCK_SIZE_MISMATCH


def test_po_01_an_offload_event_without_tokens_keeps_empty_content() -> None:
    event = only(engine(), WireStored(hashes=(11, 12), tier=Tier.CPU))
    assert event == Stored(Tier.CPU, pack_hashes((11, 12)))


def test_ev_09_tokens_without_a_size_use_the_registered_one() -> None:
    event = only(pool(), WireStored(hashes=(11, 12), token_ids=TOKENS, tier=Tier.CPU, backend_id="node-1"))
    assert isinstance(event, Stored)
    assert (event.block_size, len(event.content_hashes)) == (4, 16)


@pytest.mark.parametrize("tokens", [range(7), range(9), range(4), range(12)])
def test_hy_01_tokens_that_do_not_fill_the_blocks_are_refused(tokens: range) -> None:
    event = WireStored(hashes=(1, 2), token_ids=array("I", tokens), block_size=4)
    assert refused(engine(), event) is RejectReason.TOKEN_COUNT


def test_all_blocks_cleared_of_an_engine_touches_the_npu_alone() -> None:
    assert only(engine(own_tiers=(Tier.CPU,)), WireCleared()) == Cleared((Tier.NPU,))


def test_a_pool_clear_touches_the_pool_tiers_of_its_location_alone() -> None:
    assert only(pool(), WireCleared(backend_id="10.0.0.5")) == Cleared((Tier.CPU, Tier.DISK), backend_id="10.0.0.5")
    assert only(pool(), WireCleared(Tier.DISK, "10.0.0.5")) == Cleared((Tier.DISK,), backend_id="10.0.0.5")


def test_ev_06_a_pool_event_without_an_owner_is_about_a_location_called_like_the_pool() -> None:
    shared = pool().record.instance_id
    stores = WireStored((1,), tier=Tier.DISK), WireRemoved((1,), Tier.DISK), WireCleared(Tier.DISK)
    assert [only(pool(), event).backend_id for event in stores] == [shared] * 3
    assert only(pool(), WireCleared()) == Cleared((Tier.CPU, Tier.DISK), backend_id=shared)


def test_a_pool_removal_without_a_medium_leaves_both_pool_tiers() -> None:
    result = canonicalise((WireRemoved((1,), backend_id="node"),), pool())
    assert [event.tier for event in result.events if isinstance(event, Removed)] == [Tier.CPU, Tier.DISK]
    assert result.accepted == 1


@pytest.mark.parametrize(
    "event",
    [
        WireStored(hashes=(1,), tier=Tier.NPU, backend_id="node"),
        WireRemoved(hashes=(1,), tier=Tier.NPU, backend_id="node"),
        WireCleared(Tier.NPU, "node"),
    ],
)
def test_npu_memory_of_a_pool_is_no_tier_of_the_index(event: WireStored | WireRemoved | WireCleared) -> None:
    assert refused(pool(), event) is RejectReason.UNKNOWN_MEDIUM


def test_a_pool_event_names_its_location_and_may_name_another_space() -> None:
    same = only(pool(tenant="t"), WireStored((1,), tier=Tier.CPU, backend_id="node", model="m", tenant="t"))
    other = only(pool(tenant="t"), WireStored((1,), tier=Tier.CPU, backend_id="node", model="n", tenant="u"))
    assert isinstance(same, Stored)
    assert isinstance(other, Stored)
    assert (same.backend_id, same.model, same.tenant) == ("node", "", "")
    assert (other.model, other.tenant) == ("n", "u")


def test_ip_01_a_location_has_one_spelling() -> None:
    event = only(pool(), WireStored((1,), tier=Tier.CPU, backend_id="[0:0:0:0:0:0:0:1]"))
    assert isinstance(event, Stored)
    assert event.backend_id == "::1"


def test_a_node_pool_socket_of_an_engine_speaks_for_that_worker() -> None:
    publisher = node_pool_socket()
    assert (publisher.dialect, publisher.tiers, publisher.primary) == ("pool", (Tier.CPU, Tier.DISK), False)
    store = only(publisher, WireStored((1,), tier=Tier.DISK, backend_id="10.0.0.5"))
    assert isinstance(store, Stored)
    assert (store.tier, store.backend_id) == (Tier.DISK, "")
    assert only(publisher, WireCleared()) == Cleared((Tier.CPU, Tier.DISK))


def test_a_block_carries_at_most_its_own_keys() -> None:
    too_many = WireStored(hashes=(1,), token_ids=TOKENS[:4], block_size=4, block_keys=((), ("x",)))
    event = only(engine(), too_many)
    assert isinstance(event, Stored)
    assert event.content_hashes == content_hashes(token_bytes(TOKENS[:4]), 4).tobytes()
