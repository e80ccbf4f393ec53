"""The router's memory budget: the oldest blocks are forgotten, visibly, and the others are served on."""

import pytest

from schemas.blocks import Tier, content_hashes, pack_hashes, token_bytes
from schemas.events import IndexStored, Worker
from schemas.registry import EngineRecord
from services.router.budget import Budget, coverage
from services.router.index import native_available
from services.router.index.plain import PlainIndex
from services.router.space import BlockCounts, EventRefusedError, Space
from services.router.standing import Standings

CHAIN = 32
BLOCK = 4


def stored(number: int) -> IndexStored:
    names = pack_hashes(range(number * 1000 + 1, number * 1000 + 1 + CHAIN))
    contents = content_hashes(token_bytes(tokens(number)), BLOCK).tobytes()
    return IndexStored(Worker("a", 0), Tier.NPU, names, None, contents, 0, None, False)


def tokens(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + CHAIN * BLOCK))


def depth(space: Space, number: int) -> int:
    space.refresh([EngineRecord(instance_id="a", model="m", block_size=BLOCK)], Standings(1000.0))
    return space.match_tokens(token_bytes(tokens(number)), BLOCK, 0)[0].npu


@pytest.mark.skipif(not native_available(), reason="the compiled index is not built into this installation")
def test_the_oldest_go_and_the_loss_shows_as_coverage() -> None:
    from services.router.index.native import NativeIndex

    space, other = Space(NativeIndex(), BlockCounts()), Space(NativeIndex(), BlockCounts())
    for _ in other.apply(stored(1)):
        pass
    budget = Budget(max_bytes=1 << 40, max_space_bytes=200_000)
    for number in range(300):
        for _ in space.apply(stored(number)):
            pass
        while budget.enforce([space, other]):
            assert space.index.audit() == []
        assert space.index.stats().bytes <= 200_000
    stats = space.index.stats()
    assert 0.1 < coverage(stats.memberships, stats.forgotten) < 0.9
    assert (depth(space, 299), depth(space, 0)) == (CHAIN, 0)
    assert not space.full
    assert other.index.stats().forgotten == 0


@pytest.mark.skipif(not native_available(), reason="the compiled index is not built into this installation")
def test_over_the_budget_of_the_process_the_largest_space_pays() -> None:
    from services.router.index.native import NativeIndex

    small, large = Space(NativeIndex(), BlockCounts()), Space(NativeIndex(), BlockCounts())
    for space, chains in ((small, 20), (large, 200)):
        for number in range(chains):
            for _ in space.apply(stored(number)):
                pass
    total = small.index.stats().bytes + large.index.stats().bytes
    budget = Budget(max_bytes=total * 3 // 4, max_space_bytes=1 << 40)
    while budget.enforce([small, large]):
        pass
    assert small.index.stats().bytes + large.index.stats().bytes <= total * 3 // 4
    assert (small.index.stats().forgotten, large.index.stats().forgotten > 0) == (0, True)


def test_the_plain_index_cannot_forget_so_its_space_takes_no_more_and_says_why() -> None:
    space = Space(PlainIndex(), BlockCounts())
    budget = Budget(max_bytes=1 << 40, max_space_bytes=20_000)
    for number in range(5):
        for _ in space.apply(stored(number)):
            pass
    assert not budget.enforce([space])
    with pytest.raises(EventRefusedError, match=r"router\.max_space_bytes"):
        list(space.apply(stored(9)))
    assert depth(space, 0) == CHAIN
    space.retire(Worker("a", 0))
    while space.sweep():
        pass
    budget.enforce([space])
    list(space.apply(stored(9)))


def test_coverage_is_whole_while_nothing_was_forgotten() -> None:
    assert (coverage(0, 0), coverage(5, 0), coverage(3, 1)) == (1.0, 1.0, 0.75)
