"""The behaviour suite of the prefix index, and its agreement with a slow reference model over random histories."""

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.blocks import content_hashes, pack_hashes, prefix_keys, token_bytes
from services.router.index import native_available
from services.router.index.plain import PlainIndex
from services.router.index.port import CPU, DISK, NPU, Candidate, Coverage, PrefixIndex, StoreResult
from tests.unit.index_reference import ReferenceIndex

BLOCK = 4
W1, W2, HOST1, HOST2, REMOTE = 1, 2, 10, 11, 12
POOL_DOMAIN = 99
POOL = frozenset({HOST1, HOST2, REMOTE})
CANDIDATES = [Candidate(W1, frozenset({HOST1})), Candidate(W2, frozenset({HOST2}))]
DOMAINS = {W1: W1, W2: W2, HOST1: POOL_DOMAIN, HOST2: POOL_DOMAIN, REMOTE: POOL_DOMAIN}
MakeIndex = Callable[..., PrefixIndex]


def _native(**limits: int) -> PrefixIndex:
    from services.router.index.native import NativeIndex

    index: PrefixIndex = NativeIndex(**limits)
    return index


IMPLEMENTATIONS: list[object] = [pytest.param(PlainIndex, id="plain")]
if native_available():
    IMPLEMENTATIONS.append(pytest.param(_native, id="native"))


@pytest.fixture(params=IMPLEMENTATIONS)
def make_index(request: pytest.FixtureRequest) -> MakeIndex:
    made: MakeIndex = request.param
    return made


@pytest.fixture
def index(make_index: MakeIndex) -> PrefixIndex:
    return make_index()


def contents(tokens: list[int]) -> bytes:
    return content_hashes(token_bytes(tokens), BLOCK).tobytes()


def store(
    index: PrefixIndex,
    holder: int,
    names: list[int],
    tokens: list[int],
    tier: int = NPU,
    parent: int | None = None,
    root: int = 0,
    teacher: int | None = None,
    counted: bool = False,
) -> StoreResult:
    domain = DOMAINS[holder]
    return index.stored(
        holder,
        tier,
        domain,
        pack_hashes(names),
        parent,
        contents(tokens),
        root,
        domain if teacher is None else teacher,
        counted,
    )


def remove(index: PrefixIndex, holder: int, names: list[int], tier: int = NPU) -> int:
    return index.removed(holder, tier, DOMAINS[holder], pack_hashes(names))


def query(index: PrefixIndex, tokens: list[int], root: int = 0) -> list[Coverage]:
    keys = prefix_keys(content_hashes(token_bytes(tokens), BLOCK), root).tobytes()
    answers = index.match(keys, CANDIDATES, POOL)
    assert index.audit() == []
    return answers


def npu(*depths: int) -> list[Coverage]:
    return [Coverage(depth, 0, 0, 0, 0) for depth in depths]


def tokens(blocks: int, start: int = 1) -> list[int]:
    return list(range(start, start + blocks * BLOCK))


def test_an_empty_index_and_an_empty_query_match_nothing(index: PrefixIndex) -> None:
    assert query(index, tokens(3)) == npu(0, 0)
    store(index, W1, [1], tokens(1))
    assert query(index, []) == npu(0, 0)
    assert index.match(b"", [], frozenset()) == []


def test_ha_01_equal_tokens_match_under_different_engine_hashes(index: PrefixIndex) -> None:
    store(index, W1, [101, 102], tokens(2))
    store(index, W2, [901, 902], tokens(2))
    assert query(index, tokens(2)) == npu(2, 2)


def test_ha_01_equal_engine_hashes_of_two_workers_are_not_compared(index: PrefixIndex) -> None:
    store(index, W1, [1, 2], tokens(2))
    store(index, W2, [1, 2], tokens(2, start=100))
    assert query(index, tokens(2)) == npu(2, 0)
    assert query(index, tokens(2, start=100)) == npu(0, 2)
    remove(index, W2, [1])
    assert query(index, tokens(2)) == npu(2, 0)
    store(index, W2, [3], tokens(1, start=109), parent=2)
    assert query(index, tokens(3)) == npu(2, 0)


def test_dp_06_only_the_worker_that_stored_a_block_has_it(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    assert query(index, tokens(1)) == npu(1, 0)


def test_t32_the_match_is_the_longest_contiguous_prefix_from_token_0(index: PrefixIndex) -> None:
    store(index, W1, [1, 2, 3], tokens(3))
    store(index, W2, [1], tokens(1))
    assert query(index, tokens(5)) == npu(3, 1)
    assert query(index, tokens(2, start=5)) == npu(0, 0)


def test_sq_10_an_orphan_is_no_root_and_attaches_when_its_parent_arrives(index: PrefixIndex) -> None:
    assert store(index, W1, [13], tokens(1, start=9), parent=12).waiting == 1
    assert query(index, tokens(1, start=9)) == npu(0, 0)
    assert store(index, W1, [11, 12], tokens(2)).attached == 3
    assert query(index, tokens(3)) == npu(3, 0)
    assert index.stats().waiting == 0


def test_orphans_of_orphans_attach_in_one_go(index: PrefixIndex) -> None:
    store(index, W1, [14], tokens(1, start=13), parent=13)
    store(index, W1, [13], tokens(1, start=9), parent=12)
    store(index, W1, [11, 12], tokens(2))
    assert query(index, tokens(4)) == npu(4, 0)


def test_an_orphan_waits_for_its_own_workers_parent_only(index: PrefixIndex) -> None:
    store(index, W1, [13], tokens(1, start=9), parent=12)
    store(index, W2, [11, 12], tokens(2, start=50))
    assert query(index, [*tokens(2, start=50), *tokens(1, start=9)]) == npu(0, 2)


def test_sq_11_a_parent_that_was_never_published_is_not_bridged(index: PrefixIndex) -> None:
    store(index, W1, [1536, 1537], tokens(2))
    store(index, W1, [1792], tokens(1, start=13), parent=1664)
    assert query(index, tokens(4)) == npu(2, 0)


def test_sq_12_a_store_without_parent_in_mid_sequence_starts_a_chain_of_its_own(index: PrefixIndex) -> None:
    store(index, W1, [11, 12], tokens(2))
    store(index, W1, [13], tokens(1, start=9))
    assert query(index, tokens(1, start=9)) == npu(1, 0)
    assert query(index, tokens(3)) == npu(2, 0)


def test_sq_13_a_wrong_parent_makes_no_match_that_the_tokens_do_not_prove(index: PrefixIndex) -> None:
    store(index, W1, [11], tokens(1))
    store(index, W1, [13], tokens(1, start=9), parent=11)
    assert query(index, tokens(3)) == npu(1, 0)


def test_ex_06_removals_are_independent_of_each_other_and_unknown_ones_are_harmless(index: PrefixIndex) -> None:
    store(index, W1, [11, 12], tokens(2))
    assert remove(index, W1, [99, 12, 11]) == 2
    assert query(index, tokens(2)) == npu(0, 0)
    assert remove(index, W2, [11]) == 0
    assert index.stats().blocks == 0


def test_a_removal_in_the_middle_hides_what_follows_and_forgets_nothing(index: PrefixIndex) -> None:
    store(index, W1, [1, 2, 3, 4], tokens(4))
    store(index, W2, [1, 2, 3, 4], tokens(4))
    remove(index, W1, [2])
    assert query(index, tokens(4)) == npu(1, 4)
    store(index, W1, [2], tokens(1, start=5), parent=1)
    assert query(index, tokens(4)) == npu(4, 4)


def test_ex_01_counted_stores_need_as_many_removals(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1), counted=True)
    assert store(index, W1, [1], tokens(1), counted=True).repeated == 1
    assert remove(index, W1, [1]) == 0
    assert query(index, tokens(1)) == npu(1, 0)
    assert remove(index, W1, [1]) == 1
    assert query(index, tokens(1)) == npu(0, 0)


def test_t12_uncounted_stores_are_a_set(index: PrefixIndex) -> None:
    for _ in range(3):
        store(index, W1, [1], tokens(1))
    assert remove(index, W1, [1]) == 1
    assert query(index, tokens(1)) == npu(0, 0)


def test_counts_do_not_survive_a_clear(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1), counted=True)
    store(index, W1, [1], tokens(1), counted=True)
    assert index.cleared(W1, [NPU]) == 1
    store(index, W1, [1], tokens(1), counted=True)
    assert remove(index, W1, [1]) == 1


def test_t13_a_block_is_gone_when_the_last_name_of_it_is_removed(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    store(index, W1, [2], tokens(1))
    assert remove(index, W1, [1]) == 0
    assert query(index, tokens(1)) == npu(1, 0)
    assert remove(index, W1, [2]) == 1


def test_t14_a_removal_touches_one_tier(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    store(index, W1, [1], tokens(1), tier=CPU)
    remove(index, W1, [1])
    assert query(index, tokens(1)) == [Coverage(0, 1, 0, 0, 0), Coverage(0, 0, 0, 0, 0)]
    remove(index, W1, [1], tier=CPU)
    assert query(index, tokens(1)) == npu(0, 0)


def test_t18_clear_empties_the_named_tiers_of_one_holder(index: PrefixIndex) -> None:
    for holder in (W1, W2):
        store(index, holder, [1, 2], tokens(2))
        store(index, holder, [1, 2], tokens(2), tier=CPU)
    assert index.cleared(W1, [NPU]) == 2
    assert query(index, tokens(2)) == [Coverage(0, 2, 0, 0, 0), Coverage(2, 0, 0, 0, 0)]
    assert index.holder_blocks(W1) == (0, 2, 0)
    assert index.cleared(W1, [NPU, CPU, DISK]) == 2
    assert index.holder_blocks(W1) == (0, 0, 0)


def test_after_the_npu_prefix_the_walk_goes_through_cpu_before_disk_and_local_before_remote(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    store(index, HOST1, [1, 2], tokens(2), tier=CPU)
    store(index, REMOTE, [3], tokens(1, start=9), tier=CPU, parent=2)
    store(index, HOST1, [3, 4], tokens(2, start=9), tier=DISK, parent=2)
    store(index, REMOTE, [5], tokens(1, start=17), tier=DISK, parent=4)
    assert query(index, tokens(6)) == [Coverage(1, 1, 1, 1, 1), Coverage(0, 0, 3, 0, 2)]


def test_a_workers_own_cpu_tier_is_local_to_it_and_invisible_to_others(index: PrefixIndex) -> None:
    store(index, W1, [1, 2], tokens(2), tier=CPU)
    assert query(index, tokens(2)) == [Coverage(0, 2, 0, 0, 0), Coverage(0, 0, 0, 0, 0)]


def test_npu_blocks_behind_the_end_of_the_npu_prefix_do_not_count(index: PrefixIndex) -> None:
    store(index, W1, [1, 2, 3], tokens(3))
    store(index, HOST1, [1, 2], tokens(2), tier=CPU)
    remove(index, W1, [2])
    assert query(index, tokens(3))[0] == Coverage(1, 1, 0, 0, 0)


def test_a_hole_in_every_tier_ends_the_walk(index: PrefixIndex) -> None:
    store(index, HOST1, [1, 2, 3], tokens(3), tier=CPU)
    remove(index, HOST1, [2], tier=CPU)
    assert query(index, tokens(3))[0] == Coverage(0, 1, 0, 0, 0)


def test_pool_blocks_find_their_parent_in_the_teachers_names(index: PrefixIndex) -> None:
    store(index, W1, [1, 2], tokens(2))
    store(index, HOST2, [3], tokens(1, start=9), tier=CPU, parent=2, teacher=W1)
    assert query(index, tokens(3)) == [Coverage(2, 0, 1, 0, 0), Coverage(0, 0, 0, 0, 0)]


def test_a_waiting_pool_block_attaches_when_either_name_space_learns_its_parent(index: PrefixIndex) -> None:
    store(index, HOST1, [2], tokens(1, start=5), tier=CPU, parent=1, teacher=W1)
    store(index, HOST2, [2], tokens(1, start=5), tier=CPU, parent=1, teacher=W2)
    store(index, W1, [1], tokens(1))
    assert query(index, tokens(2))[0] == Coverage(1, 1, 0, 0, 0)
    store(index, HOST2, [1], tokens(1), tier=CPU)
    assert query(index, tokens(2))[1] == Coverage(0, 2, 0, 0, 0)


def test_all_locations_of_a_pool_share_their_names(index: PrefixIndex) -> None:
    store(index, HOST1, [1], tokens(1), tier=CPU)
    store(index, HOST2, [2], tokens(1, start=5), tier=CPU, parent=1)
    assert query(index, tokens(2))[0] == Coverage(0, 1, 1, 0, 0)
    remove(index, HOST1, [1], tier=CPU)
    assert query(index, tokens(2)) == npu(0, 0)


def by_name(index: PrefixIndex, holder: int, names: list[int], tier: int, teacher: int | None = None) -> StoreResult:
    domain = DOMAINS[holder]
    return index.stored(
        holder, tier, domain, pack_hashes(names), None, b"", 0, domain if teacher is None else teacher, False
    )


def test_blocks_without_content_are_taken_by_name_or_ignored_and_counted(index: PrefixIndex) -> None:
    store(index, W1, [1, 2], tokens(2))
    assert by_name(index, W1, [1, 2, 77], CPU) == StoreResult(attached=2, unknown=1)
    assert by_name(index, HOST1, [1], CPU, teacher=W1).attached == 1
    remove(index, W1, [1, 2])
    assert query(index, tokens(2))[0] == Coverage(0, 2, 0, 0, 0)


def test_a_name_lives_as_long_as_somebody_of_its_domain_holds_the_block(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    remove(index, W1, [1])
    assert by_name(index, W1, [1], CPU).unknown == 1
    assert store(index, W1, [2], tokens(1, start=5), parent=1).waiting == 1


def test_a_removal_takes_blocks_out_of_the_waiting_room(index: PrefixIndex) -> None:
    store(index, W1, [3, 4], tokens(2, start=9), parent=2)
    remove(index, W1, [3])
    store(index, W1, [1, 2], tokens(2))
    assert query(index, tokens(4)) == npu(2, 0)
    store(index, W1, [3], tokens(1, start=9), parent=2)
    assert query(index, tokens(4)) == npu(4, 0)


def test_a_clear_empties_the_waiting_room_of_its_holder(index: PrefixIndex) -> None:
    store(index, W1, [2], tokens(1, start=5), parent=1)
    store(index, W2, [2], tokens(1, start=5), parent=1)
    index.cleared(W1, [NPU])
    store(index, W1, [1], tokens(1))
    store(index, W2, [1], tokens(1))
    assert query(index, tokens(2)) == npu(1, 2)


def test_t11_the_waiting_room_is_bounded_and_the_oldest_leave_it(make_index: MakeIndex) -> None:
    index = make_index(max_blocks=1000, max_waiting_blocks=3)
    for name in range(10, 15):
        store(index, W1, [name], tokens(1, start=name * 10), parent=1)
    assert index.stats().waiting == 3
    assert index.stats().evicted == 2
    assert store(index, W1, [20, 21, 22, 23], tokens(4, start=900), parent=1).refused == 4
    assert index.audit() == []


def test_re_05_nothing_is_left_when_everything_was_removed(index: PrefixIndex) -> None:
    store(index, W1, [11, 12, 13], tokens(3))
    remove(index, W1, [13, 12, 11])
    stats = index.stats()
    assert (stats.blocks, stats.memberships, stats.names, stats.waiting) == (0, 0, 0, 0)


def test_a_self_parent_makes_no_loop(index: PrefixIndex) -> None:
    store(index, W1, [5], tokens(1), parent=5)
    assert query(index, tokens(1)) == npu(0, 0)
    store(index, W1, [5], tokens(1, start=77))
    assert index.audit() == []


def test_namespaces_are_apart(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    store(index, W2, [2], tokens(1), root=5)
    assert query(index, tokens(1)) == npu(1, 0)
    assert query(index, tokens(1), root=5) == npu(0, 1)
    remove(index, W2, [2])
    assert query(index, tokens(1)) == npu(1, 0)


def test_block_sizes_live_side_by_side_and_po_06_a_coarse_block_proves_nothing_finer(index: PrefixIndex) -> None:
    coarse = content_hashes(token_bytes(tokens(2)), 2 * BLOCK).tobytes()
    index.stored(W1, NPU, W1, pack_hashes([88]), None, coarse, 0, W1, False)
    store(index, W2, [1, 2], tokens(2))
    assert query(index, [*tokens(1), 99, 98, 97, 96]) == npu(0, 1)
    assert query(index, tokens(2)) == npu(0, 2)
    keys = prefix_keys(content_hashes(token_bytes(tokens(2)), 2 * BLOCK)).tobytes()
    assert index.match(keys, CANDIDATES, POOL) == npu(1, 0)


def test_lengths_that_disagree_are_refused(index: PrefixIndex) -> None:
    with pytest.raises(ValueError, match="2 engine hashes but 1 content hash"):
        index.stored(W1, NPU, W1, pack_hashes([1, 2]), None, pack_hashes([1]), 0, W1, False)


def test_chains_that_wait_for_one_name_attach_in_order_of_arrival(index: PrefixIndex) -> None:
    store(index, W1, [7], tokens(1, start=50), parent=1)
    store(index, W1, [7], tokens(1, start=60), parent=1)
    store(index, W1, [1], tokens(1))
    assert query(index, [*tokens(1), *tokens(1, start=60)]) == npu(2, 0)
    assert query(index, [*tokens(1), *tokens(1, start=50)]) == npu(1, 0)
    assert index.stats().renamed == 1


def test_a_block_without_content_brings_its_name_to_those_who_wait_for_it(index: PrefixIndex) -> None:
    store(index, HOST1, [2], tokens(1, start=5), tier=CPU, parent=1)
    store(index, W1, [1], tokens(1))
    assert by_name(index, HOST1, [1], CPU, teacher=W1).attached == 2
    assert query(index, tokens(2))[1] == Coverage(0, 0, 2, 0, 0)


def test_a_removal_takes_every_waiting_store_of_a_set_and_one_of_a_counted_publisher(index: PrefixIndex) -> None:
    for holder, counted in ((W1, False), (W2, True)):
        for _ in range(2):
            store(index, holder, [2], tokens(1, start=5), parent=1, counted=counted)
        remove(index, holder, [2])
        store(index, holder, [1], tokens(1))
    assert query(index, tokens(2)) == npu(1, 2)
    remove(index, W2, [2])
    assert query(index, tokens(2)) == npu(1, 1)


def test_the_latest_store_of_a_name_says_what_its_children_follow(index: PrefixIndex) -> None:
    store(index, HOST1, [1], tokens(1), tier=CPU)
    store(index, HOST2, [1], tokens(1, start=40), tier=CPU)
    store(index, HOST1, [2], tokens(1, start=5), tier=CPU, parent=1)
    assert query(index, [*tokens(1, start=40), *tokens(1, start=5)])[0] == Coverage(0, 1, 1, 0, 0)
    store(index, HOST1, [1], tokens(1), tier=CPU)
    store(index, HOST1, [3], tokens(1, start=5), tier=CPU, parent=1)
    assert query(index, tokens(2))[0] == Coverage(0, 2, 0, 0, 0)


def test_sq_13_a_hash_that_moves_to_another_prefix_is_counted_and_means_the_new_one(index: PrefixIndex) -> None:
    store(index, W1, [11, 12, 13], tokens(3))
    store(index, W1, [13], tokens(1, start=9), parent=11)
    assert index.stats().renamed == 1
    assert query(index, tokens(3)) == npu(2, 0)


def test_ex_03_one_hash_twice_in_a_chain_makes_no_false_match_and_no_loop(index: PrefixIndex) -> None:
    store(index, W1, [11, 12], tokens(2))
    store(index, W1, [13, 13], tokens(2, start=9), parent=12)
    assert query(index, tokens(4)) == npu(2, 0)
    assert remove(index, W1, [13]) == 1
    assert index.holder_blocks(W1) == (2, 0, 0)


def test_t38_blocks_beyond_the_budget_are_refused_and_counted(make_index: MakeIndex) -> None:
    index = make_index(max_blocks=3, max_waiting_blocks=10)
    assert store(index, W1, [1, 2, 3, 4], tokens(4)) == StoreResult(attached=3, refused=1)
    assert store(index, W2, [1, 2, 3, 4], tokens(4)) == StoreResult(attached=3, refused=1)
    assert query(index, tokens(4)) == npu(3, 3)
    assert (index.stats().blocks, index.stats().evicted) == (3, 2)
    remove(index, W1, [3])
    remove(index, W2, [3])
    assert store(index, W1, [9], tokens(1, start=900)).attached == 1


def test_a_holder_can_be_cleared_in_slices(index: PrefixIndex) -> None:
    store(index, W1, list(range(1, 11)), tokens(10))
    store(index, W1, list(range(1, 4)), tokens(3), tier=CPU)
    store(index, W1, [50], tokens(1, start=500), parent=49)
    assert index.waiting_blocks(W1) == 1
    calls = 1
    while index.clear_some(W1, (NPU, CPU, DISK), 4):
        calls += 1
        assert index.audit() == []
    assert calls == 4
    assert not index.clear_some(W1, (NPU, CPU, DISK), 4)
    stats = index.stats()
    assert (stats.blocks, stats.memberships, stats.names, stats.waiting) == (0, 0, 0, 0)


def test_unknown_removals_and_unknown_names_are_counted(index: PrefixIndex) -> None:
    store(index, W1, [1], tokens(1))
    remove(index, W1, [1, 2, 3])
    by_name(index, W1, [1], CPU)
    assert (index.stats().unknown_removals, index.stats().unknown_names) == (2, 1)


def test_many_workers_and_a_long_query_are_answered_as_the_walk_block_by_block_says(index: PrefixIndex) -> None:
    chance = random.Random(5)
    workers = range(200, 264)
    reference = ReferenceIndex()
    for worker in workers:
        depth = chance.randint(0, 30)
        for target in (index, reference):
            target.stored(
                worker, NPU, worker, pack_hashes(range(depth)), None, contents(tokens(depth)), 0, worker, True
            )
    for target in (index, reference):
        for start, length, host, tier in ((3, 9, HOST1, CPU), (12, 6, REMOTE, CPU), (15, 12, HOST2, DISK)):
            names = pack_hashes(range(100, 100 + start + length))
            target.stored(host, tier, POOL_DOMAIN, names, None, contents(tokens(start + length)), 0, POOL_DOMAIN, False)
            target.removed(host, tier, POOL_DOMAIN, pack_hashes(range(100, 100 + start)))
    candidates = [Candidate(worker, frozenset({HOST1} if worker % 2 else {HOST2})) for worker in workers]
    keys = prefix_keys(content_hashes(token_bytes(tokens(30)), BLOCK)).tobytes()
    assert index.match(keys, candidates, POOL) == reference.match(keys, candidates, POOL)


class Histories:
    """The same random events for an index and the reference model; after each step both say the same."""

    def __init__(self, make_index: MakeIndex, chance: random.Random) -> None:
        self.chance = chance
        limits = chance.choice([{}, {"max_blocks": 12, "max_waiting_blocks": 6}])
        self.index, self.reference = make_index(**limits), ReferenceIndex(**limits)

    def step(self) -> None:
        chance = self.chance
        holder = chance.choice(list(DOMAINS))
        tier = chance.choice([NPU, CPU, DISK]) if holder in (W1, W2) else chance.choice([CPU, DISK])
        kind = chance.random()
        if kind < 0.6:
            arguments = self.store_arguments(holder, tier)
            assert self.index.stored(*arguments) == self.reference.stored(*arguments)
        elif kind < 0.93:
            names = pack_hashes(chance.choices(range(1, 14), k=chance.randint(1, 4)))
            removal = (holder, tier, DOMAINS[holder], names)
            assert self.index.removed(*removal) == self.reference.removed(*removal)
        else:
            tiers = chance.choice([(NPU,), (CPU,), (DISK,), (NPU, CPU, DISK)])
            left = self.reference.cleared(holder, tiers)
            if chance.random() < 0.5:
                assert self.index.cleared(holder, tiers) == left
            else:
                while self.index.clear_some(holder, tiers, 2):
                    pass

    def store_arguments(self, holder: int, tier: int) -> tuple[int, int, int, bytes, int | None, bytes, int, int, bool]:
        chance = self.chance
        length = chance.randint(1, 4)
        names = chance.choices(range(1, 14), k=length)
        parent = chance.choice([None, None, *range(1, 14)])
        content = contents(chance.choices(range(2), k=length * BLOCK)) if chance.random() < 0.9 else b""
        domain = DOMAINS[holder]
        teacher = chance.choice([W1, W2]) if domain == POOL_DOMAIN and chance.random() < 0.7 else domain
        root = chance.choice([0, 0, 7])
        return holder, tier, domain, pack_hashes(names), parent, content, root, teacher, chance.random() < 0.3

    def check(self) -> None:
        assert self.index.audit() == []
        stats = dataclasses.asdict(self.index.stats())
        del stats["bytes"], stats["forgotten"]
        assert stats == self.reference.sizes()
        for holder in DOMAINS:
            assert self.index.holder_blocks(holder) == self.reference.holder_blocks(holder)
            assert self.index.waiting_blocks(holder) == self.reference.waiting_blocks(holder)
        for root in (0, 7):
            asked = self.chance.choices(range(2), k=self.chance.randint(1, 4) * BLOCK)
            keys = prefix_keys(content_hashes(token_bytes(asked), BLOCK), root).tobytes()
            assert self.index.match(keys, CANDIDATES, POOL) == self.reference.match(keys, CANDIDATES, POOL)


@pytest.mark.parametrize("seed", range(30))
def test_index_and_reference_agree_after_every_step_of_long_random_histories(make_index: MakeIndex, seed: int) -> None:
    histories = Histories(make_index, random.Random(seed))
    for _ in range(250):
        histories.step()
        histories.check()


@given(chance=st.randoms(use_true_random=False), steps=st.integers(1, 25))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_index_and_reference_agree_on_short_histories(make_index: MakeIndex, chance: random.Random, steps: int) -> None:
    histories = Histories(make_index, chance)
    for _ in range(steps):
        histories.step()
        histories.check()
