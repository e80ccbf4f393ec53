"""Snapshots of the index: everything comes back, in either implementation, and damage is refused."""

import random
from collections.abc import Callable

import pytest

from schemas.blocks import content_hashes, pack_hashes, prefix_keys, token_bytes
from services.router.index.port import CPU, NPU, TIERS, PrefixIndex
from tests.unit.test_index_behaviour import (
    BLOCK,
    CANDIDATES,
    DOMAINS,
    IMPLEMENTATIONS,
    POOL,
    W1,
    W2,
    Histories,
    MakeIndex,
    contents,
    query,
    remove,
    store,
    tokens,
)


@pytest.fixture(params=IMPLEMENTATIONS)
def make_writer(request: pytest.FixtureRequest) -> MakeIndex:
    made: MakeIndex = request.param
    return made


@pytest.fixture(params=IMPLEMENTATIONS)
def make_reader(request: pytest.FixtureRequest) -> MakeIndex:
    made: MakeIndex = request.param
    return made


def state(index: PrefixIndex) -> object:
    """Everything that can be asked of a small index."""
    stats = index.stats()
    return (
        [index.holder_blocks(holder) for holder in DOMAINS],
        [index.waiting_blocks(holder) for holder in DOMAINS],
        (stats.blocks, stats.memberships, stats.names, stats.waiting),
        (stats.evicted, stats.unknown_names, stats.unknown_removals, stats.renamed),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_restored_index_goes_on_as_the_one_that_was_saved(
    make_writer: MakeIndex, make_reader: MakeIndex, seed: int
) -> None:
    histories = Histories(make_writer, random.Random(seed))
    limits = {"max_blocks": 12, "max_waiting_blocks": 6} if histories.reference.max_blocks == 12 else {}
    for _ in range(8):
        for _ in range(25):
            histories.step()
        restored = make_reader(**limits)
        restored.restore(histories.index.snapshot())
        assert restored.audit() == []
        assert state(restored) == state(histories.index)
        again = make_writer(**limits)
        again.restore(restored.snapshot())
        assert state(again) == state(restored)
        histories.index = restored
        histories.check()


def test_an_empty_index_comes_back_empty(make_writer: MakeIndex, make_reader: MakeIndex) -> None:
    index = make_reader()
    index.restore(make_writer().snapshot())
    assert state(index) == state(make_reader())


def filled(make_index: MakeIndex) -> PrefixIndex:
    index = make_index()
    store(index, W1, [1, 2, 3], tokens(3), counted=True)
    store(index, W1, [1, 2, 3], tokens(3), counted=True)
    store(index, W2, [1, 2], tokens(2))
    store(index, W2, [2], tokens(1, start=50), tier=CPU)
    store(index, W2, [9, 10], tokens(2, start=90), parent=8)
    remove(index, W2, [9])
    return index


def test_counts_meanings_and_waiting_blocks_come_back(make_writer: MakeIndex, make_reader: MakeIndex) -> None:
    index = make_reader()
    index.restore(filled(make_writer).snapshot())
    assert remove(index, W1, [3]) == 0
    assert remove(index, W1, [3]) == 1
    # The latest store of name 2 in the domain of W2 was the one in its CPU.
    store(index, W2, [4], tokens(1, start=60), parent=2)
    assert query(index, tokens(1, start=50) + tokens(1, start=60))[1].npu == 0
    store(index, W2, [8], tokens(1, start=80))
    assert (index.waiting_blocks(W2), index.holder_blocks(W2)[NPU]) == (0, 5)


def test_an_index_that_is_not_empty_is_not_overwritten(make_reader: MakeIndex) -> None:
    index = filled(make_reader)
    before = state(index)
    with pytest.raises(ValueError, match="not empty"):
        index.restore(filled(make_reader).snapshot())
    assert state(index) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "not an index snapshot"),
        (lambda data: b"KVRINDEX", r"."),
        (lambda data: b"something else" * 10, r"."),
        (lambda data: data[:8] + b"\x02" + data[9:], "version"),
        (lambda data: data[:-1], r"."),
        (lambda data: data[: len(data) // 2 // 8 * 8], "damaged"),
        (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], "damaged"),
    ],
)
def test_foreign_newer_and_damaged_snapshots_are_refused_and_leave_the_index_empty(
    make_reader: MakeIndex, change: Callable[[bytes], bytes], message: str
) -> None:
    index = make_reader()
    with pytest.raises(ValueError, match=message):
        index.restore(change(filled(make_reader).snapshot()))
    assert index.stats().blocks == index.stats().waiting == 0
    assert index.audit() == []
    store(index, W1, [1], tokens(1))
    assert index.cleared(W1, TIERS) == 1


def test_a_snapshot_with_a_right_checksum_and_wrong_contents_is_refused_or_harmless(make_reader: MakeIndex) -> None:
    import struct

    import xxhash

    whole = filled(make_reader).snapshot()
    chance = random.Random(3)
    for _ in range(300):
        body = bytearray(whole[:-8])
        for _ in range(chance.randint(1, 3)):
            body[chance.randrange(16, len(body))] = chance.choice([0, 1, 2, 255, chance.randrange(256)])
        if chance.random() < 0.3:
            del body[chance.randrange(len(body)) :]
        index = make_reader()
        try:
            index.restore(bytes(body) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body), 1337)))
        except ValueError:
            assert index.stats().blocks == index.stats().waiting == 0
        keys = prefix_keys(content_hashes(token_bytes(tokens(3)), BLOCK)).tobytes()
        index.match(keys, CANDIDATES, POOL)
        index.stored(W1, NPU, DOMAINS[W1], pack_hashes([1]), None, contents(tokens(1)), 0, DOMAINS[W1], False)
