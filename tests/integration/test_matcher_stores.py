"""One behaviour suite for the waiting state, in memory and in Redis, and a long random comparison of the two."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis.asyncio as redis
from pydantic import SecretStr

from schemas.blocks import Tier, pack_hashes
from schemas.events import Location, Worker
from services.matcher.lease import Lease
from services.matcher.memory_store import MemoryStore
from services.matcher.redis_client import make_client
from services.matcher.redis_store import RedisStore
from services.matcher.settings import MatcherSettings
from services.matcher.state import (
    Answer,
    Applied,
    Content,
    FencedError,
    Forget,
    Message,
    Operation,
    Prove,
    Proved,
    Taught,
    Teach,
    Undo,
    Verdict,
    Waiting,
)
from services.matcher.store import MatcherStore
from services.runtime.settings import RedisSettings
from tests.conftest import ServerProcess, free_port, make_redis_server

SPACE = ("org/model:1", "tenant|x")
A, B = Worker("a", 0), Worker("b", 1)
HOST1, HOST2, OTHER_POOL = Location("pool", "10.0.0.1"), Location("pool", "10.0.0.2"), Location("other", "10.0.0.1")
MakeStore = Callable[..., MatcherStore]
CPU = Tier.CPU
STREAM = 1


def messages(*asked: tuple[int, list[Operation]]) -> list[Message]:
    return [Message(sequence, tuple(operations)) for sequence, operations in asked]


def settings(**changes: object) -> MatcherSettings:
    return MatcherSettings(**({"pending_ttl": 60, "content_ttl": 300, "offload_ttl": 600} | changes))  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "redis"])
async def make_store(request: pytest.FixtureRequest, redis_server: ServerProcess) -> AsyncIterator[MakeStore]:
    if request.param == "memory":
        yield lambda **changes: MemoryStore(settings(**changes))
        return
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    yield lambda **changes: RedisStore(client, settings(**changes))
    await client.aclose()


@pytest.fixture
def store(make_store: MakeStore) -> MatcherStore:
    return make_store()


@pytest.fixture
async def redis_cluster(tmp_path: Path) -> AsyncIterator[str]:
    """Three masters that share the slots; the URL of one."""
    nodes, clients = [], []
    try:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            node = make_redis_server(folder)
            # The port of the cluster bus would else be 10000 higher, and may be taken or above 65535.
            node.command += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            nodes.append(node)
            nodes[-1].start()
            clients.append(redis.from_url(nodes[-1].url))
        for number, client in enumerate(clients):
            first, last = number * 16384 // 3, (number + 1) * 16384 // 3 - 1
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            bus = nodes[0].command[nodes[0].command.index("--cluster-port") + 1]
            if number:
                await client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, bus)
        for client in clients:
            await _until_whole(client)
        yield nodes[0].url.removesuffix("/0")
    finally:
        for client in clients:
            await client.aclose()
        for node in nodes:
            node.kill()


async def _until_whole(client: redis.Redis) -> None:
    ends = time.monotonic() + 20
    while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True):
        assert time.monotonic() < ends, "the cluster did not form"
        await asyncio.sleep(0.05)


class Driver:
    """Applies single operations with rising sequences."""

    def __init__(self, store: MatcherStore) -> None:
        self.store = store
        self.sequence = 0

    async def __call__(self, operation: Operation, now: int = 0) -> object:
        self.sequence += 1
        applied = await self.store.apply(SPACE, 1, STREAM, [Message(self.sequence, (operation,))], now)
        answer = applied.answers[self.sequence]
        assert answer is not None
        return answer.results[0]


@pytest.fixture
def run(store: MatcherStore) -> Driver:
    return Driver(store)


def teach(
    *names: int,
    npu: bool = False,
    parent: int | None = None,
    root: int = 0,
    teacher: Worker = A,
    salt: int = 0,
    own: bool = False,
) -> Teach:
    contents = pack_hashes([1000 + name + salt for name in names])
    return Teach(npu, pack_hashes(names), parent, contents, root, teacher, own)


def prove(*names: int, holder: Location | Worker = HOST1, tier: Tier = CPU, own: bool = False) -> Prove:
    return Prove(pack_hashes(names), holder, tier, own)


def undo(
    *names: int, holder: Location | Worker = HOST1, tier: Tier = CPU, forget_offload: bool = False, own: bool = False
) -> Undo:
    return Undo(pack_hashes(names), holder, tier, forget_offload, own)


def content(name: int, parent: int | None = None, root: int = 0, teacher: Worker = A, salt: int = 0) -> Content:
    return Content(parent, 1000 + name + salt, root, teacher)


async def test_offload_then_pool_is_confirmed_with_its_parent_and_teacher(run: Driver) -> None:
    assert await run(teach(1, 2)) == Taught()
    assert await run(prove(1)) == Proved((content(1),))
    assert await run(prove(2)) == Proved((content(2, parent=1),))


async def test_a_chain_keeps_its_outer_parent_and_its_namespace(run: Driver) -> None:
    await run(teach(5, 6, parent=4, root=77))
    await run(teach(7, root=77))
    assert await run(prove(5, 6, 7)) == Proved((content(5, parent=4), content(6, parent=5), content(7, root=77)))


async def test_pool_then_offload_is_matched_for_every_waiting_holder(run: Driver) -> None:
    assert await run(prove(1)) == Proved((None,))
    assert await run(prove(1, holder=HOST2, tier=Tier.DISK)) == Proved((None,))
    waiting = (Waiting(HOST1, CPU), Waiting(HOST2, Tier.DISK))
    assert await run(teach(9, 1)) == Taught(matched=((1, waiting),))
    assert await run.store.pending(SPACE) == 0


async def test_content_learnt_from_an_npu_event_matches_a_pool_event_without_any_offload_event(run: Driver) -> None:
    await run(teach(1, npu=True, root=5))
    assert await run(prove(1)) == Proved((content(1, root=5),))


async def test_pool_then_npu_is_matched_too(run: Driver) -> None:
    await run(prove(1))
    assert await run(teach(1, npu=True)) == Taught(matched=((0, (Waiting(HOST1, CPU),)),))


async def test_a_repeated_pool_event_waits_once(run: Driver) -> None:
    await run(prove(1))
    await run(prove(1))
    assert await run(teach(1)) == Taught(matched=((0, (Waiting(HOST1, CPU),)),))


async def test_offload_then_two_pool_locations_are_both_confirmed(run: Driver) -> None:
    await run(teach(1))
    assert await run(prove(1)) == Proved((content(1),))
    assert await run(prove(1, holder=HOST2)) == Proved((content(1),))


async def test_in_one_event_some_blocks_match_and_others_wait(run: Driver) -> None:
    await run(teach(1))
    assert await run(prove(1, 2)) == Proved((content(1), None))
    assert await run.store.pending(SPACE) == 1


async def test_pool_removed_before_the_offload_event_is_not_matched(run: Driver) -> None:
    await run(prove(1))
    await run(undo(1))
    assert await run(teach(1)) == Taught()


async def test_a_removal_touches_only_its_holder_and_tier(run: Driver) -> None:
    await run(prove(1))
    await run(prove(1, tier=Tier.DISK))
    await run(prove(1, holder=HOST2))
    await run(undo(1))
    assert await run(teach(1)) == Taught(matched=((0, (Waiting(HOST1, Tier.DISK), Waiting(HOST2, CPU))),))


async def test_engine_removal_of_its_offload_statement_makes_a_later_pool_event_wait(run: Driver) -> None:
    await run(teach(1))
    await run(undo(1, holder=A, forget_offload=True))
    assert await run(prove(1)) == Proved((None,))


async def test_engine_removal_of_its_offload_statement_leaves_npu_content(run: Driver) -> None:
    await run(teach(1))
    await run(teach(1, npu=True))
    await run(undo(1, holder=A, forget_offload=True))
    assert await run(prove(1)) == Proved((content(1),))


async def test_content_survives_confirmation_and_removal_for_the_next_store(run: Driver) -> None:
    await run(teach(1))
    await run(prove(1))
    await run(undo(1))
    assert await run(prove(1)) == Proved((content(1),))


async def test_npu_content_wins_over_offload_content_whatever_came_last(run: Driver) -> None:
    await run(teach(1, npu=True, root=9))
    await run(teach(1, root=0))
    assert await run(prove(1)) == Proved((content(1, root=9),))


async def test_better_content_that_comes_later_corrects_what_was_confirmed_and_all_that_follows_it(run: Driver) -> None:
    await run(teach(1, 2, 3))
    await run(prove(1, 2, 3))
    await run(prove(2, holder=HOST2))
    corrected = await run(teach(1, 2, 3, npu=True, root=9))
    only_first, both = (Waiting(HOST1, CPU),), (Waiting(HOST1, CPU), Waiting(HOST2, CPU))
    assert corrected == Taught(corrected=((0, only_first), (1, both), (2, only_first)))
    assert await run(teach(1, 2, 3, npu=True, root=9)) == Taught()


async def test_equal_content_that_comes_later_corrects_nothing(run: Driver) -> None:
    await run(teach(1, 2))
    await run(prove(1, 2))
    assert await run(teach(1, 2, npu=True)) == Taught()


async def test_what_was_removed_or_cleared_is_not_confirmed_again_by_a_correction(run: Driver) -> None:
    await run(teach(1, 2))
    await run(prove(1, 2))
    await run(prove(1, 2, holder=HOST2))
    await run(undo(1))
    await run(Forget(HOST2, (CPU, Tier.DISK)))
    assert await run(teach(1, 2, npu=True, root=9)) == Taught(corrected=((1, (Waiting(HOST1, CPU),)),))


async def test_waiting_ends_after_its_time_and_is_reported_once(run: Driver) -> None:
    await run(prove(1, 2), now=1000)
    assert await run.store.expire(SPACE, 1, 60_999, 100) == []
    expired = await run.store.expire(SPACE, 1, 61_000, 100)
    assert {(one.engine_hash, one.waiting) for one in expired} == {(n, Waiting(HOST1, CPU)) for n in (1, 2)}
    assert await run.store.expire(SPACE, 1, 99_000, 100) == []
    assert await run(teach(1), now=61_001) == Taught()


async def test_an_overdue_entry_does_not_match_even_before_it_is_collected(run: Driver) -> None:
    await run(prove(1), now=0)
    assert await run(teach(1), now=60_001) == Taught()


async def test_content_is_forgotten_after_its_time_and_kept_by_use(run: Driver) -> None:
    await run(teach(1, 2, npu=True), now=0)
    assert await run(prove(1), now=200_000) == Proved((content(1),))
    assert await run(prove(1), now=450_000) == Proved((content(1),))
    assert await run(prove(2), now=450_000) == Proved((None,))
    assert await run(prove(1), now=750_001) == Proved((None,))


async def test_offload_content_lives_longer(run: Driver) -> None:
    await run(teach(1, 2), now=0)
    assert await run(prove(1), now=599_999) == Proved((content(1),))
    assert await run(prove(2), now=600_001) == Proved((None,))


async def test_forgetting_a_location_or_a_whole_pool_leaves_the_others(run: Driver) -> None:
    for holder in (HOST1, HOST2, OTHER_POOL, A):
        await run(prove(1, holder=holder))
    await run(Forget(HOST1, (CPU, Tier.DISK)))
    await run(Forget(Location("other", ""), (CPU,)))
    await run(Forget(B, (CPU,)))
    assert await run(teach(1)) == Taught(matched=((0, (Waiting(HOST2, CPU), Waiting(A, CPU))),))


async def test_forgetting_names_tiers(run: Driver) -> None:
    await run(prove(1))
    await run(prove(1, tier=Tier.DISK))
    await run(Forget(HOST1, (Tier.DISK,)))
    assert await run(teach(1)) == Taught(matched=((0, (Waiting(HOST1, CPU),)),))


async def test_a_full_waiting_room_lets_the_oldest_go_and_counts(make_store: MakeStore) -> None:
    store = make_store(max_pending=2)
    capped = 0
    for sequence, name in enumerate((1, 2, 3), start=1):
        applied = await store.apply(SPACE, 1, STREAM, messages((sequence, [prove(name)])), sequence)
        capped += applied.capped_pending
    assert capped == 1
    assert await store.pending(SPACE) == 2
    applied = await store.apply(SPACE, 1, STREAM, messages((4, [teach(1, 2, 3)])), 5)
    waiting = (Waiting(HOST1, CPU),)
    assert applied.answers[4] == Answer((Taught(matched=((1, waiting), (2, waiting))),))


async def test_a_message_is_applied_once_and_answers_the_same_again(store: MatcherStore) -> None:
    await store.apply(SPACE, 1, STREAM, messages((1, [prove(1)])), 0)
    first = await store.apply(SPACE, 1, STREAM, messages((2, [teach(1)]), (3, [prove(1, holder=HOST2)])), 0)
    again = await store.apply(SPACE, 2, STREAM, messages((2, [teach(1)]), (3, [prove(1, holder=HOST2)])), 0)
    assert again.answers == first.answers
    assert first.answers[2] == Answer((Taught(matched=((0, (Waiting(HOST1, CPU),)),)),))
    old = await store.apply(SPACE, 2, STREAM, messages((1, [prove(1)])), 0)
    assert old == Applied({1: None})


async def test_repeated_and_new_messages_may_come_together(store: MatcherStore) -> None:
    first = await store.apply(SPACE, 1, STREAM, messages((1, [prove(1)]), (2, [teach(1)])), 0)
    both = await store.apply(SPACE, 2, STREAM, messages((2, [teach(1)]), (3, [prove(2)])), 0)
    assert both.answers == {2: first.answers[2], 3: Answer((Proved((None,)),))}
    assert (await store.apply(SPACE, 3, STREAM, messages((2, [teach(1)]), (3, [prove(2)])), 0)).answers == both.answers


async def test_answers_that_were_not_published_survive_smaller_batches_of_the_next_leader(store: MatcherStore) -> None:
    asked = messages((1, [prove(1)]), (2, [teach(1)]), (3, [prove(2)]), (4, [teach(2)]))
    first = await store.apply(SPACE, 1, STREAM, asked, 0)
    one = await store.apply(SPACE, 2, STREAM, asked[:1], 0)
    some = await store.apply(SPACE, 2, STREAM, asked[1:3], 0)
    rest = await store.apply(SPACE, 2, STREAM, asked[3:], 0)
    assert one.answers | some.answers | rest.answers == first.answers


async def test_a_lower_generation_changes_nothing_and_a_higher_one_ends_what_waited(store: MatcherStore) -> None:
    pool = Location("pool", "")

    async def send(sequence: int, generation: int, *operations: Operation, lowest: int = 0) -> Answer | None:
        message = Message(sequence, operations, pool, generation, lowest)
        return (await store.apply(SPACE, 1, STREAM, [message], 0)).answers[sequence]

    assert await send(1, 5, prove(1)) == Answer((Proved((None,)),))
    assert await send(2, 4, prove(2)) == Answer((), Verdict.RETIRED)
    assert await send(3, 5, prove(2), lowest=6) == Answer((), Verdict.RETIRED)
    assert await store.pending(SPACE) == 1
    assert await send(4, 6, prove(3)) == Answer((Proved((None,)),), Verdict.RESTARTED)
    assert await send(4, 6, prove(3)) == Answer((Proved((None,)),), Verdict.RESTARTED)
    applied = await store.apply(SPACE, 1, STREAM, messages((5, [teach(1, 2, 3)])), 0)
    assert applied.answers[5] == Answer((Taught(matched=((2, (Waiting(HOST1, CPU),)),)),))


async def test_names_in_a_workers_own_domain_meet_neither_those_of_others_nor_those_of_pools(run: Driver) -> None:
    await run(teach(1, npu=True, teacher=A, own=True))
    await run(teach(1, npu=True, teacher=B, salt=7))
    assert await run(prove(1, holder=A, own=True)) == Proved((content(1),))
    assert await run(prove(1, holder=B, own=True)) == Proved((None,))
    assert await run(prove(1)) == Proved((content(1, teacher=B, salt=7),))
    await run(undo(1, holder=B, own=True))
    assert await run.store.pending(SPACE) == 0


async def test_an_engine_takes_back_its_own_offload_statement_only(run: Driver) -> None:
    await run(teach(1, teacher=A))
    await run(undo(1, holder=B, forget_offload=True))
    assert await run(prove(1)) == Proved((content(1),))
    await run(undo(1, holder=A, forget_offload=True))
    assert await run(prove(1, holder=HOST2)) == Proved((None,))


async def test_a_successor_whose_clock_is_a_little_behind_finds_what_was_just_learnt(run: Driver) -> None:
    boundary = 10 * 300_000 // 4
    await run(teach(1, npu=True), now=boundary + 5)
    assert await run(prove(1), now=boundary - 5) == Proved((content(1),))


async def test_full_content_memory_refuses_and_counts(redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    store = RedisStore(client, settings(max_content=8))
    applied = await store.apply(SPACE, 1, STREAM, messages((1, [teach(1, 2, 3, npu=True)])), 0)
    assert applied.capped_content == 1
    await client.aclose()


async def test_old_content_is_unlinked_and_never_left_to_a_blocking_expiry(redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    store = RedisStore(client, settings())
    await store.apply(SPACE, 1, STREAM, messages((1, [teach(1, npu=True), teach(2)])), 0)
    slices = [key async for key in client.scan_iter("*:content:*")] + [
        key async for key in client.scan_iter("*:offload:*")
    ]
    assert len(slices) == 2
    await store.expire(SPACE, 1, 600_000 * 3 // 2 + 1, 100)
    assert await client.exists(*slices) == 0
    await client.aclose()


async def test_sequences_count_anew_in_a_stream_that_was_made_anew(store: MatcherStore) -> None:
    await store.apply(SPACE, 1, 1, messages((500, [prove(1)])), 0)
    applied = await store.apply(SPACE, 1, 2, messages((1, [teach(1)])), 0)
    assert applied.answers[1] == Answer((Taught(matched=((0, (Waiting(HOST1, CPU),)),)),))
    again = await store.apply(SPACE, 1, 2, messages((1, [teach(1)])), 0)
    assert again.answers == applied.answers


async def test_a_leader_that_was_replaced_cannot_write(store: MatcherStore) -> None:
    await store.apply(SPACE, 7, STREAM, messages((1, [prove(1)])), 0)
    with pytest.raises(FencedError):
        await store.apply(SPACE, 6, STREAM, messages((2, [teach(1)])), 0)
    with pytest.raises(FencedError):
        await store.expire(SPACE, 6, 10**9, 10)
    assert await store.pending(SPACE) == 1


async def test_spaces_do_not_touch_each_other(store: MatcherStore) -> None:
    other = ("m", "t")
    await store.apply(SPACE, 1, STREAM, messages((1, [teach(1)])), 0)
    applied = await store.apply(other, 1, STREAM, messages((1, [prove(1)])), 0)
    assert applied.answers[1] == Answer((Proved((None,)),))
    assert set(await store.spaces()) == {SPACE, other}


async def test_re_02_all_keys_of_a_space_share_one_hash_tag(redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    run = Driver(RedisStore(client, settings()))
    for operation in (teach(1, 2), prove(1, 3), prove(4, holder=A), teach(1, npu=True, root=3), Forget(A, (CPU,))):
        await run(operation)
    keys = [key.decode() for key in await client.keys("*")]
    tags = {key[key.index("{") : key.index("}")] for key in keys if not key.endswith(":spaces")}
    assert tags == {"{org%2Fmodel%3A1|tenant%7Cx"}
    await client.aclose()


async def test_re_02_a_batch_with_two_spaces_is_written_to_a_real_cluster(redis_cluster: str) -> None:
    client = make_client(RedisSettings(mode="cluster", url=SecretStr(redis_cluster)))
    store = RedisStore(client, settings())
    spaces = [(f"model-{number}", "default") for number in range(12)]  # in slots of all three nodes
    for space in spaces:
        asked = messages((1, [prove(1, 2)]), (2, [teach(1, 2, npu=True)]), (3, [Forget(HOST1, (CPU,))]))
        applied = await store.apply(space, 1, STREAM, asked, 0)
        assert applied.answers[2] is not None
        assert await store.expire(space, 1, 10**6, 10) == []
    assert set(await store.spaces()) == set(spaces)
    lease = Lease(client, "kvroute", 5.0)
    assert await lease.acquire()
    await lease.release()
    await client.aclose()


async def test_re_05_no_waiting_or_group_key_is_left_when_everything_is_undone(redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    run = Driver(RedisStore(client, settings()))
    await run(prove(1, 2, 3))
    await run(prove(3, holder=A))
    await run(undo(3, 2, 1))
    await run(undo(3, holder=A))
    left = {key.decode().rpartition("}:")[2] for key in await client.keys("*")}
    assert left <= {"kvroute:matcher:spaces", "meta"}
    await client.aclose()


@pytest.mark.parametrize("seed", range(8))
async def test_memory_and_redis_agree_over_long_random_histories(seed: int, redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    limits = {"max_pending": 1000, "pending_ttl": 5, "content_ttl": 8, "offload_ttl": 12}
    stores = (MemoryStore(settings(**limits)), RedisStore(client, settings(**limits)))
    chance = random.Random(seed)
    holders = (HOST1, HOST2, OTHER_POOL, A, B)
    now, sequence, recent = 0, 0, []

    def names(count: int) -> list[int]:
        return chance.sample(range(1, 12), chance.randint(1, count))

    def operation() -> Operation:
        kind = chance.random()
        if kind < 0.35:
            parent = chance.choice([None, 20, 21])
            return teach(
                *names(4),
                npu=chance.random() < 0.5,
                parent=parent,
                root=chance.choice([0, 3]),
                salt=chance.choice([0, 1]),
                teacher=chance.choice([A, B]),
                own=chance.random() < 0.3,
            )
        if kind < 0.75:
            holder = chance.choice(holders)
            own = chance.random() < 0.3 and isinstance(holder, Worker)
            return prove(*names(3), holder=holder, tier=chance.choice([CPU, Tier.DISK]), own=own)
        if kind < 0.95:
            holder = chance.choice(holders)
            own = chance.random() < 0.3 and isinstance(holder, Worker)
            return undo(*names(3), holder=holder, forget_offload=chance.random() < 0.3, own=own)
        target = chance.choice([HOST1, Location("pool", ""), A])
        return Forget(target, chance.choice([(CPU,), (CPU, Tier.DISK)]))

    for _ in range(400):
        now += chance.choice([0, 1, 10, 400, 3000])
        if recent and chance.random() < 0.1:
            # A new leader takes what was not published again, in batches of its own size.
            asked = recent[: chance.randint(1, len(recent))]
        else:
            asked = []
            for _ in range(chance.randint(1, 4)):
                sequence += 1
                operations = tuple(operation() for _ in range(chance.randint(0, 3)))
                publisher = chance.choice([None, A, Location("pool", "")])
                generation = sequence // 40 + chance.choice([0, 0, 0, 1])
                asked.append(Message(sequence, operations, publisher, generation, chance.choice([0, sequence // 50])))
            recent = asked
        one, other = [await store.apply(SPACE, 1, STREAM, asked, now) for store in stores]
        assert _sorted(one) == _sorted(other)
        if chance.random() < 0.2:
            expired = [set(await store.expire(SPACE, 1, now, 1000)) for store in stores]
            assert expired[0] == expired[1]
        assert await stores[0].pending(SPACE) == await stores[1].pending(SPACE)
    await client.aclose()


def _sorted(applied: Applied) -> object:
    """Results with the holders of a block in one order (their order means nothing)."""

    def tidy(result: object) -> object:
        if isinstance(result, Taught):
            return [
                [(block, sorted(waiting, key=repr)) for block, waiting in part]
                for part in (result.matched, result.corrected)
            ]
        return result

    return {
        sequence: None if answer is None else (answer.verdict, [tidy(result) for result in answer.results])
        for sequence, answer in applied.answers.items()
    }


async def test_t38_teachers_that_nothing_refers_to_are_forgotten(redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    store = RedisStore(client, settings())
    prefix = store._key(SPACE)
    day = 24 * 3600 * 1000
    now = 100 * day
    for number in range(300):
        teach = Teach(True, pack_hashes([number + 1]), None, pack_hashes([number]), 0, Worker(f"pod-{number}", 0))
        await store.apply(SPACE, 1, STREAM, messages((number + 1, [teach])), now)
    assert await client.hlen(prefix + "teachers") == 300
    late = now + 200_000
    prove = Prove(pack_hashes([8]), HOST1, CPU)
    (answer,) = (await store.apply(SPACE, 1, STREAM, messages((301, [prove])), late)).answers.values()
    assert answer is not None
    await store.expire(SPACE, 1, now + day + 1_200_000 + 1, 1000)
    assert await client.hlen(prefix + "teachers") == await client.zcard(prefix + "teacher_times") == 1
    assert await client.hvals(prefix + "teachers") == [b"Wpod-7\x000"], "its content was of use later"
    await client.hset(prefix + "teachers", b"12345678", b"Wold\x000")
    await store.expire(SPACE, 1, late + day, 1000)
    await store.expire(SPACE, 1, late + 3 * day, 1000)
    assert await client.exists(prefix + "teachers", prefix + "teacher_times") == 0
    await client.aclose()


async def test_t38_a_day_of_ever_new_pods_leaves_no_key_behind(redis_server: ServerProcess) -> None:
    client = redis.from_url(redis_server.url)
    await client.flushdb()
    store = RedisStore(client, settings())
    now = 10_000_000
    for pod in range(60):
        worker = Worker(f"pod-{pod}", 0)
        names = pack_hashes([pod * 10 + 1, pod * 10 + 2])
        operations: list[Operation] = [
            Teach(False, names, None, names, 0, worker),
            Prove(names, HOST1, CPU),
            Prove(pack_hashes([pod * 10 + 5]), HOST2, CPU),
            Teach(True, names, None, names, 0, worker),
        ]
        asked = [Message(pod + 1, tuple(operations), worker, 7, 0)]
        await store.apply(SPACE, 1, STREAM, asked, now + pod * 60_000)
    ends = now + 3 * 24 * 3600 * 1000
    for step in range(200):
        await store.expire(SPACE, 1, now + step * 100_000, 1000)
    await store.expire(SPACE, 1, ends, 1000)
    gone = await store.publishers(SPACE)
    assert len(gone) == 60
    await store.forget_publishers(SPACE, 1, gone)
    for family in ("poor", "content", "offload"):
        for key in await client.keys(f"{store._key(SPACE)}{family}*"):
            await client.unlink(key)  # Redis' own clock ends these; here no time has passed
    await store.expire(SPACE, 1, ends, 1000)
    left = {key.removeprefix(store._key(SPACE).encode()) for key in await client.keys(store._key(SPACE) + "*")}
    assert left == {b"meta"}
    with pytest.raises(FencedError):
        await store.forget_publishers(SPACE, 0, gone)
    await client.aclose()
