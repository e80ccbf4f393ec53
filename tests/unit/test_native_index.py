"""The compiled index beside the plain one: equal after every step, also where callers break every rule."""

import random
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from schemas import blocks
from schemas.blocks import chain, content_hashes, first_key, pack_hashes, plain_content_hashes, plain_prefix_keys
from services.router.index import native_available, plain
from services.router.index.plain import PlainIndex
from services.router.index.port import CPU, DISK, NPU, TIERS, Candidate, Coverage, PrefixIndex
from tests.unit.test_index_snapshots import state

if not native_available():
    pytest.skip("the compiled index is not built into this installation", allow_module_level=True)

from services.router.index.native import NativeIndex

Call = tuple[str, tuple[Any, ...]]


def both(native: PrefixIndex, reference: PrefixIndex, call: Call) -> None:
    """The same call on both gives the same result or the same kind of error."""
    results = []
    for index in (native, reference):
        try:
            results.append(getattr(index, call[0])(*call[1]))
        except (ValueError, TypeError, OverflowError) as error:
            results.append(ValueError if isinstance(error, OverflowError) else type(error))
    assert results[0] == results[1], call


def same(native: PrefixIndex, reference: PrefixIndex, holders: range) -> None:
    assert native.audit() == []
    for holder in holders:
        assert native.holder_blocks(holder) == reference.holder_blocks(holder)
        assert native.waiting_blocks(holder) == reference.waiting_blocks(holder)
    ours, theirs = native.stats(), reference.stats()
    for field in (
        "blocks",
        "memberships",
        "names",
        "waiting",
        "evicted",
        "unknown_names",
        "unknown_removals",
        "renamed",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize("seed", range(10))
def test_histories_that_keep_no_rule_neither_crash_nor_diverge(seed: int) -> None:
    """Holders in several domains, holders that are domains, any parent, any count, empty and uneven hash lists."""
    chance = random.Random(seed)
    limits = chance.choice([{}, {"max_blocks": 9, "max_waiting_blocks": 5}])
    native, reference = NativeIndex(**limits), PlainIndex(**limits)
    numbers = range(1, 6)
    for _ in range(600):
        holder, tier = chance.choice(numbers), chance.choice([NPU, NPU, CPU, DISK])
        names = pack_hashes(chance.choices(range(7), k=chance.choice([0, 1, 2, 3, 9])))
        kind = chance.random()
        if kind < 0.6:
            contents = pack_hashes(chance.choices(range(3), k=len(names) // 8))
            contents = chance.choice([contents, contents, contents, b"", contents + bytes(8), contents[:-1]])
            parent = chance.choice([None, *range(7)])
            domain, teacher = chance.choice(numbers), chance.choice(numbers)
            arguments = (
                holder,
                tier,
                domain,
                names,
                parent,
                contents,
                chance.choice([0, 5]),
                teacher,
                chance.random() < 0.4,
            )
            both(native, reference, ("stored", arguments))
        elif kind < 0.9:
            both(native, reference, ("removed", (holder, tier, chance.choice(numbers), names)))
        elif kind < 0.95:
            both(native, reference, ("cleared", (holder, chance.choice([(NPU,), (CPU, DISK), TIERS, (), (NPU, NPU)]))))
        else:
            while native.clear_some(holder, TIERS, 2):
                assert native.audit() == []
            reference.cleared(holder, TIERS)
        same(native, reference, numbers)
        keys = plain_prefix_keys(chance.choices(range(3), k=chance.randint(0, 4)), chance.choice([0, 5])).tobytes()
        candidates = [Candidate(n, frozenset(chance.sample(numbers, 2))) for n in chance.sample(numbers, 3)]
        pools = frozenset(chance.sample(numbers, 2))
        both(native, reference, ("match", (keys, candidates, pools)))
    copy, plain_copy = NativeIndex(**limits), PlainIndex(**limits)
    copy.restore(reference.snapshot())
    plain_copy.restore(native.snapshot())
    assert state(copy) == state(plain_copy) == state(native)


@pytest.mark.parametrize("bits", [3, 5, 9])
def test_colliding_keys_and_sets_are_kept_apart_as_the_plain_index_does(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = (1 << bits) - 1
    monkeypatch.setattr(plain, "chain", lambda previous, content: chain(previous, content) & mask)
    monkeypatch.setattr(plain, "first_key", lambda root, content: first_key(root, content) & mask)
    chance = random.Random(bits)
    native, reference = NativeIndex(hash_bits=bits), PlainIndex()
    workers = range(1, 40)
    for step in range(1500):
        worker = chance.choice(workers)
        names = pack_hashes(chance.choices(range(40), k=chance.randint(1, 5)))
        if chance.random() < 0.7:
            contents = pack_hashes(chance.choices(range(50), k=len(names) // 8))
            parent = chance.choice([None, *range(40)])
            both(native, reference, ("stored", (worker, NPU, worker, names, parent, contents, 0, worker, False)))
        else:
            both(native, reference, ("removed", (worker, NPU, worker, names)))
        if step % 50 == 0:
            same(native, reference, workers)
        keys = array("Q", [chance.randrange(mask + 1) for _ in range(4)])
        candidates = [Candidate(worker) for worker in workers]
        both(native, reference, ("match", (keys.tobytes(), candidates, frozenset())))


def test_mixed_block_sizes_live_side_by_side() -> None:
    native = NativeIndex()
    tokens = array("I", range(96)).tobytes()
    for worker, block_size in ((1, 8), (2, 16), (3, 32), (4, 3)):
        contents = content_hashes(tokens, block_size)
        names = pack_hashes(range(100 * worker, 100 * worker + len(contents)))
        native.stored(worker, NPU, worker, names, None, contents.tobytes(), 0, worker, False)
    candidates = [Candidate(worker) for worker in (1, 2, 3, 4)]
    for block_size, depths in ((8, [12, 0, 0, 0]), (16, [0, 6, 0, 0]), (32, [0, 0, 3, 0]), (3, [0, 0, 0, 32])):
        matched = native.match_tokens(tokens, block_size, 0, candidates, frozenset())
        assert [coverage.npu for coverage in matched] == depths


@pytest.mark.parametrize("root", [0, 7])
def test_tokens_contents_and_keys_ask_the_same(root: int) -> None:
    chance = random.Random(root)
    tokens = array("I", [chance.randrange(1 << 32) for _ in range(16 * 300)]).tobytes()
    contents = content_hashes(tokens, 16)
    keys = plain_prefix_keys(contents, root).tobytes()
    candidates, pools = (Candidate(1, frozenset({3})), Candidate(2)), frozenset({3, 4})
    for index in (NativeIndex(), PlainIndex()):
        for holder, tier, start, stop in ((1, NPU, 0, 200), (2, NPU, 0, 90), (3, CPU, 80, 250), (4, DISK, 240, 300)):
            names = pack_hashes(range(300))
            domain = holder if tier == NPU else 9
            index.stored(holder, tier, domain, names, None, contents.tobytes(), root, domain, False)
            index.removed(holder, tier, domain, pack_hashes([*range(start), *range(stop, 300)]))
        expected = [Coverage(200, 50, 0, 0, 50), Coverage(90, 0, 160, 0, 50)]
        assert index.match(keys, candidates, pools) == expected
        assert index.match_tokens(tokens, 16, root, candidates, pools) == expected
        assert index.match_contents(contents.tobytes(), root, candidates, pools) == expected
        assert index.match_contents(contents, root, candidates, pools) == expected
        assert index.match_contents(contents[:3], root, candidates, pools)[0] == Coverage(3, 0, 0, 0, 0)
        assert index.match_tokens(memoryview(tokens)[4:], 16, root, candidates, pools)[0] == Coverage(0, 0, 0, 0, 0)


def test_block_hashes_are_exact_for_every_block_size_from_1_to_4096_tokens() -> None:
    chance = random.Random(1)
    tokens = array("I", [chance.randrange(1 << 32) for _ in range(4096)]).tobytes()
    for block_size in [*range(1, 270), *range(270, 4096, 97), 4096]:
        part = tokens[: 4 * block_size * min(3, 4096 // block_size)]
        assert content_hashes(part, block_size) == plain_content_hashes(part, block_size)
    for block_size in (1, 16, 100):
        contents = content_hashes(tokens, block_size)
        for root in (0, 1, 1 << 63):
            assert blocks.prefix_keys(contents, root) == plain_prefix_keys(contents, root)
            keys = blocks.hashing.token_keys(tokens, block_size, root)
            assert keys == plain_prefix_keys(contents, root).tobytes()


@pytest.mark.parametrize("seed", [0, 1, 1337, (1 << 64) - 1])
def test_xxh3_agrees_with_the_xxhash_package_for_every_length_and_seed(seed: int) -> None:
    import xxhash

    data = random.Random(seed).randbytes(2100)
    for length in [*range(530), 1023, 1024, 1025, 1088, 1089, 2048, 2049, 2100]:
        assert blocks.hashing.xxh3_64(data[:length], seed) == xxhash.xxh3_64_intdigest(data[:length], seed)


def test_512_holders_on_a_block_cost_no_more_than_8() -> None:
    def bytes_for(workers: int) -> int:
        index = NativeIndex()
        names, contents = pack_hashes(range(1, 20_001)), pack_hashes(range(5, 20_005))
        for worker in range(1, workers + 1):
            index.stored(worker, NPU, worker, names, None, contents, 0, worker, False)
        assert index.stats().memberships == workers * 20_000
        return index.stats().bytes

    # What differs are the holders themselves and one set of 512 members.
    assert bytes_for(512) < bytes_for(8) + 512 * 1024


def test_everything_that_was_stored_and_removed_leaves_no_byte_behind() -> None:
    index = NativeIndex()
    empty = index.stats().bytes
    chance = random.Random(2)
    for worker in range(1, 30):
        names = pack_hashes([chance.getrandbits(64) for _ in range(700)])
        contents = pack_hashes([chance.getrandbits(64) for _ in range(700)])
        index.stored(worker, worker % 3, worker, names, None, contents, 0, worker, True)
        index.stored(worker, worker % 3, worker, names, None, contents, 0, worker, True)
        index.stored(worker, NPU, worker, names, 12345, contents, 0, worker, True)
    assert index.stats().bytes > empty + 29 * 700 * 40
    for worker in range(1, 30):
        index.cleared(worker, TIERS)
    # Catalogues of holders and set numbers keep their places, blocks and names keep nothing.
    assert index.stats().bytes < empty + 64 * 1024


def test_removing_and_storing_for_long_does_not_decay() -> None:
    index = NativeIndex()
    chance = random.Random(4)
    live: list[bytes] = []
    sizes = []
    for step in range(6000):
        names = pack_hashes([chance.getrandbits(64) for _ in range(16)])
        contents = pack_hashes([chance.getrandbits(64) for _ in range(16)])
        index.stored(1, NPU, 1, names, None, contents, 0, 1, False)
        live.append(names)
        if len(live) > 500:
            index.removed(1, NPU, 1, live.pop(chance.randrange(len(live))))
        if step in (1000, 5999):
            sizes.append(index.stats().bytes)
    assert index.audit() == []
    assert sizes[1] < sizes[0] * 1.15


def test_under_a_budget_the_oldest_blocks_that_nothing_follows_go_first_and_the_loss_is_counted() -> None:
    index = NativeIndex()
    chains = []
    for number in range(400):
        names, contents = [pack_hashes(range(number * 100 + k, number * 100 + k + 32)) for k in (1, 1_000_001)]
        index.stored(1, NPU, 1, names, None, contents, 0, 1, False)
        chains.append((names, contents))
    budget = index.stats().bytes * 2 // 3
    while index.shrink(budget, 256):
        assert index.audit() == []
    stats = index.stats()
    assert stats.bytes <= budget
    assert stats.forgotten == 400 * 32 - stats.memberships > 0
    candidates = (Candidate(1),)
    depths = [index.match_contents(contents, 0, candidates, frozenset())[0].npu for _, contents in chains]
    # Nothing in the middle has gone: what is left of each chain is a prefix of it.
    assert sum(depths) == stats.memberships
    assert sum(depths[:100]) < sum(depths[300:]) / 2
    # The engine's own removals of what was forgotten are no surprise, and settle the account.
    for names, _ in chains:
        index.removed(1, NPU, 1, names)
    assert (index.stats().forgotten, index.stats().unknown_removals, index.stats().memberships) == (0, 0, 0)


def test_unique_prefixes_for_24_simulated_hours_stay_within_the_budget_and_return_to_the_baseline() -> None:
    index = NativeIndex()
    budget, sizes = 3_000_000, []
    serial = 0
    for hour in range(24):
        for _ in range(200):
            names, contents = (
                pack_hashes(range(serial, serial + 64)),
                pack_hashes(range(~serial & 0xFFFFFFFF, (~serial & 0xFFFFFFFF) + 64)),
            )
            index.stored(hour % 7 + 1, NPU, hour % 7 + 1, names, None, contents, 0, hour % 7 + 1, False)
            serial += 64
            while index.shrink(budget, 4096):
                pass
        sizes.append(index.stats().bytes)
    assert max(sizes) <= budget
    for worker in range(1, 8):
        index.cleared(worker, TIERS)
    assert index.stats().bytes < 128 * 1024
    assert index.audit() == []


def test_a_query_beside_a_writer_sees_each_event_entirely_or_not_at_all() -> None:
    index = NativeIndex()
    contents = content_hashes(array("I", range(16 * 512)).tobytes(), 16).tobytes()
    names = pack_hashes(range(512))
    candidates = (Candidate(1), Candidate(2))
    stop = threading.Event()
    seen: set[int] = set()
    wrong: list[object] = []

    def ask() -> None:
        while not stop.is_set():
            for coverage in index.match_contents(contents, 0, candidates, frozenset()):
                seen.add(coverage.npu)
                if coverage.npu not in (0, 512):
                    wrong.append(coverage)

    readers = [threading.Thread(target=ask) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(400):
        for worker in (1, 2):
            index.stored(worker, NPU, worker, names, None, contents, 0, worker, False)
        for worker in (1, 2):
            index.removed(worker, NPU, worker, names)
        index.snapshot()
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert index.audit() == []
    assert seen <= {0, 512}


@pytest.mark.parametrize(
    "call",
    [
        lambda index: index.stored(1, 3, 1, b"", None, b"", 0, 1, False),
        lambda index: index.stored(-1, 0, 1, b"", None, b"", 0, 1, False),
        lambda index: index.stored(1 << 40, 0, 1, b"", None, b"", 0, 1, False),
        lambda index: index.removed(1, 7, 1, b""),
        lambda index: index.cleared(1, (0, 9)),
        lambda index: index.match_tokens(b"abc", 1, 0, (), frozenset()),
        lambda index: index.match_tokens(b"abcd", 0, 0, (), frozenset()),
        lambda index: index.match(b"abc", (), frozenset()),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_both(call: Callable[[PrefixIndex], object]) -> None:
    for index in (NativeIndex(), PlainIndex()):
        with pytest.raises(ValueError, match=r"."):
            call(index)
        assert index.audit() == []
