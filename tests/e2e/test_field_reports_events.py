"""Faults reported from the field, replayed as they were told: the reported batches go over real sockets, and the answer
of the router is the one that the reporter should have got. (Codecs and cores have the same cases in unit tests.)
"""

from typing import Any

import msgpack
import pytest

from tests.e2e.reported_site import BLOCK, NODE, Site, gpu_remove, gpu_store, tokens
from tests.e2e.support import Counts, eventually

DIGEST = bytes.fromhex("00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff")


async def test_ev_01_array_and_map_events_make_one_chain(site: Site) -> None:
    await site.engine("A")
    site.publish("A", ["BlockStored", [11, 12], None, tokens(2), BLOCK, None, "GPU", None])
    site.publish("A", gpu_store([13], [9, 10, 11, 12], 12))
    assert await site.npu("A", tokens(3)) == 3
    site.publish(
        "A", ["BlockStored", [14], 13, tokens(1, first=13), BLOCK, None], gpu_store([15], tokens(1, first=17), 14)
    )
    assert await site.npu("A", tokens(5)) == 5


async def test_ev_01_a_publisher_whose_events_are_all_refused_is_no_silent_zero(site: Site) -> None:
    await site.engine("A")
    for number in range(3):
        site.publish("A", ["BlockStoredV9", [number], None, tokens(1), BLOCK])
    assert await site.refused("A") == {"unknown_event": 3}
    assert "unknown_event 3" in await site.note("A")
    site.publish("A", gpu_store([1], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    assert await site.no_note("A")


async def test_ev_02_short_long_and_future_events_are_read(site: Site) -> None:
    await site.engine("A")
    site.publish("A", ["BlockStored", [11], None, tokens(1), BLOCK, None], dp_rank=None)
    newest = ["BlockStored", [12], 11, [5, 6, 7, 8], BLOCK, None, "GPU", None, [[]], 0, "full_attention", None]
    newest += ["future-field", {"x": 1}]
    site.publishers["A"].publish(msgpack.packb([1000.0, [newest], 0, "future-batch-field"]))
    assert await site.npu("A", tokens(2)) == 2


async def test_ev_05_a_digest_of_32_bytes_is_stored_and_removed_by_one_rule(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([DIGEST], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    site.publish("A", gpu_remove(DIGEST))
    assert await site.npu("A", tokens(1)) == 0
    site.publish("A", gpu_store([b"\x00"], tokens(1)))
    site.publish("A", gpu_store([""], tokens(1)), gpu_store([b""], tokens(1)), gpu_store([77], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    assert await site.refused("A") == {"bad_hash": 3}


async def test_ev_06_a_pool_that_publishes_the_low_64_bits_meets_the_engines_digest(site: Site) -> None:
    await site.engine("A", store_backend="Mooncake")
    await site.pool()
    digest = b"\xaa" * 24 + bytes.fromhex("0102030405060708")
    site.publish("A", gpu_store([digest], tokens(1)))
    site.publish("A", gpu_remove(digest))
    await site.settle()
    event = {"type": "BlockStored", "block_hashes": [72623859790382856], "parent_block_hash": None, "token_ids": []}
    site.publish("POOL", event | {"block_size": 0, "medium": "SHARED_STORAGE"})
    await site.settle()
    counts = await site.counts("A", tokens(1))
    assert (counts.npu, counts.disk, counts.matched) == (0, 1, BLOCK)


async def test_ev_07_frames_that_are_no_message_are_counted_by_reason_and_reading_goes_on(site: Site) -> None:
    await site.engine("A")
    payload = msgpack.packb([1000.0, [gpu_store([1], tokens(1))], 0])
    publisher = site.publishers["A"]
    for frames in (
        [payload],
        [b"kv-events", payload],
        [b"kv-events", b"0001", payload],
        [b"kv-events", bytes(8), payload, b""],
    ):
        publisher.send(frames)
    site.publish("A", gpu_store([1], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    assert await site.refused("A", "messages") == {"frame_count": 3, "sequence_width": 1}


async def test_ev_09_an_event_of_the_pool_master_is_one_entry_with_a_time_in_seconds(site: Site) -> None:
    await site.engine("A", store_backend="Mooncake")
    await site.pool()
    site.publish("A", gpu_store([0x9000000000000001], tokens(1)))
    site.publish("A", gpu_remove(0x9000000000000001))
    await site.settle()
    event = {
        "event_id": 1, "timestamp": 1753868745000, "event_type": "stored", "type": "BlockStored", "model_name": None,
        "block_size": None, "additional_salt": None, "lora_name": None, "tenant_id": "default", "backend_id": "node-1",
        "group_id": None, "medium": "cpu", "dp_rank": None, "object_key": "0x9000000000000001",
        "seq_hashes": [10376293541461622785], "block_hashes": [-8070450532247928831], "base_block_idx": 0,
        "parent_hash": None, "token_ids": None, "parent_block_hash": None,
    }  # fmt: skip
    site.publish("POOL", event, timestamp=1753868745000)
    await site.settle()
    assert await site.counts("A", tokens(1)) == Counts(cpu=1, cpu_remote=1, matched=BLOCK)
    workers = (await site.router.http.get("/workers")).json()["workers"]
    (pool,) = [worker for worker in workers if worker["instance_id"] == site.name("POOL")]
    assert pool["endpoints"]["0"]["locations"] == {"node-1": {"cpu_blocks": 1, "disk_blocks": 0, "waiting_blocks": 0}}
    assert 0 <= pool["endpoints"]["0"]["seconds_since_last_event"] < 60


async def test_ev_10_the_tag_may_come_last_and_a_bad_tag_costs_its_event_alone(site: Site) -> None:
    await site.engine("A")
    last = {"block_hashes": [11], "block_size": 4, "token_ids": tokens(1), "parent_block_hash": None}
    site.publish("A", last | {"type": "BlockStored"})
    site.publish("A", {"block_hashes": [12]})
    site.publish("A", {"type": "BlockMoved", "block_hashes": [11]}, gpu_store([13], [5, 6, 7, 8], 11))
    site.publish("A", {1: "BlockStored", 2: [14]})
    assert await site.npu("A", tokens(2)) == 2
    assert (await site.refused("A"))["unknown_event"] >= 2


async def test_ha_01_engines_with_seeds_of_their_own_match_by_content(site: Site) -> None:
    await site.engine("A")
    await site.engine("B")
    site.publish("A", gpu_store([101, 102], tokens(2)))
    site.publish("B", gpu_store([901, 902], tokens(2)))
    assert await site.npu("A", tokens(2)) == 2
    assert await site.npu("B", tokens(2)) == 2
    site.publish("B", gpu_remove(101, 102))
    assert await site.npu("A", tokens(2)) == 2
    assert await site.npu("B", tokens(2)) == 2


async def test_ha_04_an_adapter_and_a_salt_of_one_name_are_two_namespaces(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11], tokens(1), lora_name="X", extra_keys=[["X"]]))
    assert await site.npu("A", tokens(1), cache_salt="X") == 0
    assert await site.npu("A", tokens(1)) == 0
    assert await site.npu("A", tokens(1), lora_name="X") == 1


async def test_ha_05_an_adapters_name_in_the_extra_keys_is_no_image(site: Site) -> None:
    await site.engine("A")
    named = {"lora_name": "adapter-116", "lora_id": 117, "extra_keys": [["adapter-116"]], "group_idx": 0}
    site.publish("A", gpu_store([11], tokens(1), **named))
    assert await site.npu("A", tokens(1), lora_name="adapter-116") == 1
    assert await site.npu("A", tokens(1), lora_name="adapter-116", cache_salt="salt-1") == 0
    site.publish("A", gpu_store([12], tokens(1), lora_name="adapter-116", extra_keys=[["adapter-116", "salt-1"]]))
    assert await site.npu("A", tokens(1), lora_name="adapter-116", cache_salt="salt-1") == 1


async def test_ha_06_an_adapters_block_is_not_the_base_models(site: Site) -> None:
    await site.engine("A")
    await site.engine("B")
    site.publish("A", gpu_store([11], tokens(1)))
    site.publish("B", gpu_store([12], tokens(1), lora_name="ad"))
    assert (await site.npu("A", tokens(1)), await site.npu("B", tokens(1))) == (1, 0)
    site.publish("B", gpu_remove(12))
    assert (await site.npu("A", tokens(1)), await site.npu("B", tokens(1))) == (1, 0)


async def test_ha_07_pool_blocks_of_an_unknown_adapter_are_offered_to_none(site: Site) -> None:
    await site.engine("A", store_backend="Mooncake")
    await site.pool()
    event = {"type": "BlockStored", "block_hashes": [11], "token_ids": tokens(1), "block_size": BLOCK}
    site.publish("POOL", event | {"parent_block_hash": None, "medium": "CPU", "lora_name": None})
    await site.settle()
    assert await site.counts("A", tokens(1)) == Counts(cpu=1, cpu_remote=1, matched=BLOCK)
    assert await site.counts("A", tokens(1), lora_name="b") == Counts()


async def test_t28_salted_blocks_are_invisible_without_their_salt_by_tokens_and_by_hash(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11, 12], tokens(2), extra_keys=[["salt"], None]))
    # A child that is stored later has no salt in its keys; it belongs to its parent's namespace all the same.
    site.publish("A", gpu_store([13], tokens(1, first=9), 12))
    assert await site.npu("A", tokens(3), cache_salt="salt") == 3
    assert await site.npu("A", tokens(3)) == 0
    assert await site.npu("A", tokens(3), cache_salt="other") == 0
    hashes = [14643705804678351452, 16777012769546811212]
    body: dict[str, Any] = {"model": site.model, "block_size": BLOCK}
    for name, namespace, expected in (
        ("block_hashes", {}, 0), ("seq_hashes", {}, 0), ("block_hashes", {"cache_salt": "salt"}, 2 * BLOCK),
    ):  # fmt: skip
        answer = await site.router.http.post("/query_by_hash", json=body | {name: hashes} | namespace)
        assert answer.status_code == 200, answer.text
        assert answer.json()["default"][site.name("A")]["longest_matched"] == expected
    site.publish("A", gpu_store([99], tokens(1, first=50), 98, extra_keys=[["salt"]]))
    assert await site.npu("A", tokens(1, first=50), cache_salt="salt") == 0


async def test_t29_two_images_under_one_text_are_told_apart_and_found_by_their_own_keys(site: Site) -> None:
    await site.engine("A")
    cat, dog = [["img-cat", 0]], [["img-dog", 0]]
    site.publish("A", gpu_store([11], tokens(1), extra_keys=[cat]))
    asked = {"block_extra_keys": {"0": cat}}, {"block_extra_keys": {"0": dog}}, {}
    assert [await site.npu("A", tokens(1), **keys) for keys in asked] == [1, 0, 0]
    site.publish("A", gpu_store([12], tokens(1), extra_keys=[dog]))
    assert [await site.npu("A", tokens(1), **keys) for keys in asked] == [1, 1, 0]
    site.publish("A", gpu_remove(11))
    assert [await site.npu("A", tokens(1), **keys) for keys in asked] == [0, 1, 0]


async def test_bs_01_a_disagreeing_block_size_shows_at_the_first_event(site: Site) -> None:
    await site.engine("A", block_size=32)
    site.publish("A", gpu_store([11], range(64), block_size=64))
    assert await site.refused("A") == {"block_size_mismatch": 1}
    assert (await site.status("A"))["block_size"] == {"registered": 32, "disagreeing": 64}
    body = {"model": site.model, "block_size": 64, "token_ids": [*range(64)]}
    answer = await site.router.http.post("/query", json=body)
    assert answer.headers["x-kvroute-outcome"] == "other_block_size"
    assert await site.note("A") == "block_size 64 in the events, 32 in the registration"


async def test_bs_02_stores_of_another_size_and_their_removals_leave_nothing(site: Site) -> None:
    await site.engine("A")
    size = 500
    for first in range(0, 10_000, size):
        hashes = range(first + 1, first + size + 1)
        site.publish("A", *(gpu_store([value], tokens(1, 8), block_size=8) for value in hashes))
        site.publish("A", gpu_remove(*hashes))
    await site.settle()
    assert await site.router.held(site.name("A")) == (0, 0, 0)
    assert await site.refused("A") == {"block_size_mismatch": 10_000}
    indexer = (await site.router.http.get("/workers")).json()["indexer"]
    (space,) = [entry for entry in indexer if entry["model_name"] == site.model]
    assert (space["total_blocks"], space["memberships"], space["waiting_blocks"]) == (0, 0, 0)


async def test_bs_05_a_prompt_below_one_block_has_a_reason_of_its_own(site: Site) -> None:
    await site.engine("A", block_size=784)
    body = {"model": site.model, "block_size": 784, "token_ids": [*range(240)]}
    answer = await site.router.http.post("/query", json=body)
    assert answer.headers["x-kvroute-outcome"] == "shorter_than_block"
    assert answer.json()["default"][site.name("A")]["longest_matched"] == 0


async def test_ex_01_a_block_announced_twice_needs_two_removals(site: Site) -> None:
    await site.engine("A")
    for _ in range(2):
        site.publish("A", gpu_store([11], tokens(1)))
    site.publish("A", gpu_remove(11))
    assert await site.npu("A", tokens(1)) == 1
    site.publish("A", gpu_remove(11))
    assert await site.npu("A", tokens(1)) == 0
    site.publish("A", gpu_remove(11), gpu_remove(4711))
    site.publish("A", gpu_store([11], tokens(1)), gpu_store([11], tokens(1)), {"type": "AllBlocksCleared"})
    assert await site.npu("A", tokens(1)) == 0
    site.publish("A", gpu_store([11], tokens(1)), gpu_remove(11))
    assert await site.npu("A", tokens(1)) == 0


async def test_ex_01_counting_can_be_switched_off_for_a_publisher(site: Site) -> None:
    await site.engine("A", counted=False)
    site.publish("A", gpu_store([11], tokens(1)), gpu_store([11], tokens(1)), gpu_remove(11))
    assert await site.npu("A", tokens(1)) == 0


async def test_ex_03_one_hash_twice_in_an_event_costs_that_event_alone(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11, 12], tokens(2)))
    site.publish("A", gpu_store([13, 13], tokens(2, first=9), 12), gpu_store([14], tokens(1, first=9), 14))
    assert await site.npu("A", tokens(4)) == 2
    assert await site.refused("A") == {"duplicate_hash": 1, "self_parent": 1}


async def test_ex_04_a_cleared_engine_is_empty_at_once(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11], tokens(1)))
    assert await site.npu("A", tokens(1)) == 1
    site.publish("A", {"type": "AllBlocksCleared"})
    assert await site.npu("A", tokens(1)) == 0
    site.publish("A", gpu_store([11], tokens(1)))
    site.publish("A", ["AllBlocksCleared"])
    assert await site.npu("A", tokens(1)) == 0


async def test_ex_06_an_unknown_hash_does_not_end_a_removal(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11, 12], tokens(2)))
    site.publish("A", gpu_remove(99, 12, 11))
    assert await site.npu("A", tokens(2)) == 0
    assert await site.router.held(site.name("A")) == (0, 0, 0)


async def test_re_05_a_chain_removed_from_its_end_leaves_nothing_and_a_bad_event_costs_itself(site: Site) -> None:
    await site.engine("A")
    site.publish("A", gpu_store([11, 12, 13], tokens(3)))
    site.publish("A", gpu_remove(13, 12, 11))
    assert await site.npu("A", tokens(3)) == 0
    assert await site.router.held(site.name("A")) == (0, 0, 0)
    site.publish("A", gpu_store([21], tokens(1)), {"type": "BlockStored", "block_hashes": "bad"})
    assert await site.npu("A", tokens(1)) == 1
    assert await site.refused("A") == {"missing_field": 1}


async def test_t14_a_removal_from_device_memory_leaves_the_copy_in_host_memory(site: Site) -> None:
    await site.engine("A", offload=True)
    site.publish("A", gpu_store([11], tokens(1)), gpu_store([11], tokens(1), medium="CPU"), gpu_remove(11))
    await site.settle()
    assert await site.counts("A", tokens(1)) == Counts(cpu=1, matched=BLOCK)


async def test_po_01_events_without_tokens_change_the_tier_of_known_blocks(site: Site) -> None:
    await site.engine("A", offload=True)
    site.publish("A", gpu_store([11, 12], tokens(2)))
    site.publish("A", gpu_store([11, 12], [], block_size=0, medium="CPU"))
    site.publish("A", gpu_remove(11, 12))
    await site.settle()
    assert await site.counts("A", tokens(2)) == Counts(cpu=2, matched=2 * BLOCK)


async def test_t23_a_token_less_event_that_comes_first_is_held_until_its_content_is_known(site: Site) -> None:
    await site.engine("A", offload=True)
    site.publish("A", gpu_store([11, 12], [], block_size=0, medium="CPU"))
    await site.settle()
    assert await site.counts("A", tokens(2)) == Counts()
    site.publish("A", gpu_store([11, 12], tokens(2)), gpu_remove(11, 12))
    await site.settle()
    assert await site.counts("A", tokens(2)) == Counts(cpu=2, matched=2 * BLOCK)


async def test_po_06_a_coarse_object_proves_nothing_about_finer_blocks(site: Site) -> None:
    await site.engine("A", store_backend="Mooncake")
    await site.pool()
    event = {"type": "BlockStored", "block_hashes": [88], "token_ids": tokens(2), "block_size": 8, "medium": "CPU"}
    site.publish("POOL", event | {"parent_block_hash": None})
    await site.settle()
    assert await site.counts("A", [1, 2, 3, 4, 99, 98, 97, 96]) == Counts()
    assert await site.refused("POOL") == {"block_size_mismatch": 1}


async def test_po_07_an_evicted_object_is_not_offered_any_more(site: Site) -> None:
    await site.engine("A", store_backend="Mooncake", backend_ids=[NODE])
    await site.pool()
    site.publish("A", gpu_store([11], tokens(1)), gpu_remove(11))
    await site.settle()
    await site.stored_in_pool(11)
    assert await site.counts("A", tokens(1)) == Counts(cpu=1, matched=BLOCK)
    site.publish("POOL", {"event_type": "removed", "seq_hashes": [11], "medium": "cpu", "backend_id": NODE})
    await site.settle()
    assert await site.counts("A", tokens(1)) == Counts()


async def test_po_08_a_pool_that_comes_back_elsewhere_starts_empty_and_harms_no_engine(site: Site) -> None:
    await site.engine("A", store_backend="Mooncake", backend_ids=[NODE])
    await site.pool()
    site.publish("A", gpu_store([11, 12], tokens(2)), gpu_remove(12))
    await site.settle()
    await site.stored_in_pool(12)
    assert await site.counts("A", tokens(2)) == Counts(npu=1, cpu=1, matched=2 * BLOCK)
    gone = site.publishers.pop("POOL")
    await gone.close()
    await site.pool()

    async def after_the_switch() -> Counts:
        return await site.counts("A", tokens(2))

    await eventually(after_the_switch, Counts(npu=1, matched=BLOCK))
    await site.stored_in_pool(12)
    assert await site.counts("A", tokens(2)) == Counts(npu=1, cpu=1, matched=2 * BLOCK)


@pytest.mark.parametrize("mamba_first", [True, False])
async def test_hy_01_groups_that_form_no_prefix_do_not_poison_the_chain(site: Site, mamba_first: bool) -> None:
    await site.engine("A")
    mamba = gpu_store([501], tokens(3), group_idx=0, kv_cache_spec_kind="mamba")
    main = gpu_store([501, 502, 503], tokens(3), group_idx=3, kv_cache_spec_kind="mla_attention")
    site.publish("A", *([mamba, main] if mamba_first else [main, mamba]))
    site.publish("A", gpu_remove(501, group_idx=0))
    assert await site.npu("A", tokens(3)) == 3


async def test_hy_02_a_removal_in_a_sliding_window_group_leaves_full_attention_alone(site: Site) -> None:
    await site.engine("A")
    full = gpu_store([1, 2, 3], tokens(3), group_idx=0, kv_cache_spec_kind="full_attention")
    window = gpu_store([1, 2, 3], tokens(3), group_idx=1, kv_cache_spec_kind="sliding_window")
    site.publish("A", full, window | {"kv_cache_spec_sliding_window": 4})
    site.publish("A", gpu_remove(3, group_idx=1))
    assert await site.npu("A", tokens(3)) == 3
    site.publish("A", gpu_remove(3, group_idx=0))
    assert await site.npu("A", tokens(3)) == 2
