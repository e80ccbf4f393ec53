"""A router's snapshot: what it restores equals what it was taken of, and nothing else is believed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.blocks import Tier, content_hashes, pack_hashes, prefix_keys, token_bytes
from schemas.events import (
    WIRE_VERSION,
    IndexBatch,
    IndexCleared,
    IndexEvent,
    IndexGroup,
    IndexRemoved,
    IndexStored,
    Location,
    Worker,
)
from schemas.registry import EngineRecord, PoolRecord, RetiredRecord
from services.router.index import create_index
from services.router.index.port import PrefixIndex
from services.router.snapshot_form import MAGIC, SnapshotRefusedError, adopt, content_of, read, write
from services.router.spaces import Spaces
from services.runtime.registry_store import Registry

MODEL, BLOCK = "m", 4


def make_index() -> PrefixIndex:
    return create_index("auto", 100_000, 1_000)


def engine(name: str, generation: int = 1) -> EngineRecord:
    return EngineRecord(
        instance_id=name, model=MODEL, block_size=BLOCK, generation=generation, backend_ids=(f"host-{name}",)
    )


def registry(*engines: EngineRecord, retired: tuple[RetiredRecord, ...] = (), pool: bool = True) -> Registry:
    record = PoolRecord(instance_id="pool", model=MODEL, block_size=BLOCK, generation=1, endpoint="tcp://p:1")
    return Registry({(one.instance_id, 0): one for one in engines}, {"pool": record} if pool else {}, retired)


BOTH = registry(engine("a"), engine("b"))


def tokens_of(chain: int) -> list[int]:
    return [chain * 100 + offset for offset in range(3 * BLOCK)]


def stored(holder: Worker | Location, chain: int, parent: int | None = None, tier: Tier = Tier.NPU) -> IndexStored:
    contents = content_hashes(token_bytes(tokens_of(chain)), BLOCK).tobytes()
    teacher = Worker("a", 0) if isinstance(holder, Location) else None
    return IndexStored(
        holder, tier, pack_hashes(range(chain * 10 + 1, chain * 10 + 4)), parent, contents, 0, BLOCK, False, teacher
    )


def apply(
    spaces: Spaces, sequence: int, name: str, *events: IndexEvent, generation: int = 1, tenant: str = "default"
) -> None:
    source = "pool" if name == "pool" else "engine"
    group = IndexGroup(sequence, source, name, 0, generation, sequence, sequence, 100.0 + sequence, list(events))  # type: ignore[arg-type]
    for _ in spaces.apply(IndexBatch(WIRE_VERSION, MODEL, tenant, [group], 1)):
        pass


def filled(known: Registry = BOTH) -> Spaces:
    spaces = Spaces(make_index)
    spaces.set_registry(known)
    return spaces


def restored(body: bytes, known: Registry = BOTH) -> Spaces:
    spaces = filled(known)
    adopt(spaces, *read(body, make_index))
    return spaces


def body_of(spaces: Spaces) -> bytes:
    return write(content_of(spaces, 77, 5, 200.0))


def coverages(spaces: Spaces, chain: int, tenant: str = "default") -> list[Any]:
    space = spaces.find(MODEL, tenant)
    assert space is not None
    keys = prefix_keys(content_hashes(token_bytes(tokens_of(chain)), BLOCK)).tobytes()
    return [tuple(one) for one in space.index.match(keys, space.candidates, space.pool_holders)]


NAMES, CHAINS = st.sampled_from("ab"), st.integers(1, 5)
events = st.one_of(
    st.builds(lambda name, chain: (name, stored(Worker(name, 0), chain)), NAMES, CHAINS),
    st.builds(
        lambda chain, host: ("pool", stored(Location("pool", f"host-{host}"), chain, tier=Tier.CPU)), CHAINS, NAMES
    ),
    st.builds(
        lambda name, chain: (name, IndexRemoved(Worker(name, 0), Tier.NPU, pack_hashes([chain * 10 + 2]))),
        NAMES,
        CHAINS,
    ),
    st.builds(lambda name: (name, IndexCleared(Worker(name, 0), (Tier.NPU,))), NAMES),
    st.builds(lambda name, chain: (name, stored(Worker(name, 0), chain + 5, parent=chain * 10 + 9)), NAMES, CHAINS),
)


@settings(max_examples=60, deadline=None)
@given(before=st.lists(events, max_size=20), after=st.lists(events, max_size=10))
def test_a_restored_router_goes_on_as_the_one_that_was_never_stopped(
    before: list[tuple[str, IndexEvent]], after: list[tuple[str, IndexEvent]]
) -> None:
    spaces = filled()
    for sequence, (name, event) in enumerate(before, 1):
        apply(spaces, sequence, name, event)
    copy = restored(body_of(spaces))
    for one in (spaces, copy):
        for sequence, (name, event) in enumerate(after, len(before) + 1):
            apply(one, sequence, name, event)
        for space in one.spaces.values():
            assert space.index.audit() == []
    for chain in range(1, 11):
        assert coverages(copy, chain) == coverages(spaces, chain)


def test_groups_that_the_snapshot_contains_are_not_applied_again() -> None:
    spaces = filled()
    apply(spaces, 3, "a", stored(Worker("a", 0), 1))
    copy = restored(body_of(spaces))
    apply(copy, 3, "a", IndexRemoved(Worker("a", 0), Tier.NPU, pack_hashes([11])))
    assert copy.counts.repeated_group == 1
    assert coverages(copy, 1)[0][0] == 3


def test_freshness_and_generations_come_back() -> None:
    spaces = filled()
    apply(spaces, 3, "a", stored(Worker("a", 0), 1))
    copy = restored(body_of(spaces))
    publisher = copy.publishers.get(("engine", "a", 0))
    assert (publisher.generation, publisher.last_seq, publisher.last_event_at, publisher.events) == (1, 3, 103.0, 1)
    apply(copy, 4, "a", stored(Worker("a", 0), 2), generation=0)
    assert copy.counts.retired_generation == 1


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (registry(engine("b"), pool=True), "unregistered, tombstone swept"),
        (registry(engine("a", generation=9), engine("b")), "registered anew"),
        (
            registry(
                engine("b"), retired=(RetiredRecord(retired_kind="engine", instance_id="a", model=MODEL, generation=1),)
            ),
            "tombstone",
        ),
    ],
)
def test_t16_who_left_while_the_router_was_down_is_not_offered_after_a_warm_start(known: Registry, why: str) -> None:
    spaces = filled()
    apply(spaces, 1, "a", stored(Worker("a", 0), 1))
    apply(spaces, 2, "b", stored(Worker("b", 0), 1))
    copy = restored(body_of(spaces), known)
    by_name = dict(zip(sorted(name for name, _ in known.engines), coverages(copy, 1), strict=True))
    assert by_name["b"][0] == 3, why
    assert by_name.get("a", (0,))[0] == 0, why
    while copy.sweep():
        pass
    space = copy.find(MODEL, "default")
    assert space is not None
    assert space.index.stats().memberships == 3


def test_spaces_stay_apart_and_numbers_are_never_given_out_twice() -> None:
    spaces = filled()
    apply(spaces, 1, "a", stored(Worker("a", 0), 1))
    apply(spaces, 1, "a", stored(Worker("a", 0), 2), tenant="other")
    copy = restored(body_of(spaces))
    assert (coverages(copy, 1)[0][0], coverages(copy, 2)[0][0]) == (3, 0)
    apply(copy, 2, "pool", stored(Location("pool", "host-b"), 3, tier=Tier.CPU))
    assert [one[0] for one in coverages(copy, 3)] == [0, 0]
    assert [sum(one) for one in coverages(copy, 3)] == [3, 3]


def test_what_is_damaged_foreign_or_of_a_later_release_is_refused_with_its_reason() -> None:
    spaces = filled()
    apply(spaces, 1, "a", stored(Worker("a", 0), 1))
    body = body_of(spaces)
    refused = {
        "foreign": b"something else",
        "version": MAGIC + (99).to_bytes(4, "little") + body[8:],
        "damaged": body[:-20],
    }
    for reason, bad in refused.items():
        with pytest.raises(SnapshotRefusedError) as error:
            read(bad, make_index)
        assert error.value.reason == reason
    with pytest.raises(SnapshotRefusedError):
        read(b"", make_index)


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_no_flipped_byte_passes(position: int, flip: int) -> None:
    spaces = filled()
    apply(spaces, 1, "a", stored(Worker("a", 0), 1))
    body = bytearray(body_of(spaces))
    body[position % len(body)] ^= flip
    with pytest.raises(SnapshotRefusedError):
        read(bytes(body), make_index)
