"""State words and what is offered: from what ingest, health checks and this router itself know."""

from dataclasses import replace
from typing import Any

import pytest

from schemas.blocks import Tier, content_hashes, pack_hashes, prefix_keys, token_bytes
from schemas.events import WIRE_VERSION, IndexBatch, IndexEvent, IndexGroup, IndexStored, Location, Worker
from schemas.liveness import Liveness, LivenessState
from schemas.registry import EngineRecord, PoolRecord
from schemas.streams import StreamRecord, StreamState
from services.router.answers import mooncake_answer, query_answer
from services.router.index.plain import PlainIndex
from services.router.publishers import Publisher
from services.router.spaces import Spaces
from services.router.standing import Following, Heard, Standing, Standings, standing_of
from services.runtime.registry_store import Registry

MODEL, BLOCK, STALE_AFTER, NOW = "m", 4, 30.0, 10_000.0
ENDPOINTS = {Tier.NPU: "tcp://10.0.0.1:5557"}


def engine(name: str = "a", generation: int = 5, **fields: Any) -> EngineRecord:
    given = {"endpoints": ENDPOINTS, "backend_ids": (f"host-{name}",)} | fields
    return EngineRecord(instance_id=name, model=MODEL, block_size=BLOCK, generation=generation, **given)


POOL = PoolRecord(instance_id="pool", model=MODEL, block_size=BLOCK, generation=1, endpoint="tcp://p:1")


def stream(state: StreamState = StreamState.LIVE, since: float = 1.0, **fields: Any) -> StreamRecord:
    given = {
        "source": "engine",
        "instance_id": "a",
        "dp_rank": 0,
        "model": MODEL,
        "tenant": "default",
        "generation": 5,
        "state_since": NOW - since,
        "written_at": NOW,
        "writer": "w",
        "coverage": 1.0,
    }
    return StreamRecord(state=state, **(given | fields))  # type: ignore[arg-type]


def standing(
    heard: StreamRecord | None,
    *,
    silence: float = 1.0,
    record: EngineRecord | PoolRecord | None = None,
    liveness: LivenessState | None = None,
    following: Following = Following.CURRENT,
    incomplete_before: int = 0,
    before: Standing | None = None,
    publisher: Publisher | None = None,
) -> Standing:
    known = Liveness("a", 0, liveness, 1.0, 1.0, reason="refused") if liveness else None
    return standing_of(
        record or engine(),
        publisher or Publisher(5, 8, NOW - 3, 2),
        Heard(heard, silence),
        known,
        following,
        STALE_AFTER,
        incomplete_before,
        before,
    )


@pytest.mark.parametrize("state", [word for word in StreamState if word is not StreamState.STALE])
def test_the_word_of_ingest_is_the_word_of_the_answer(state: StreamState) -> None:
    found = standing(stream(state, reason="why", coverage=0.5, last_message_at=NOW - 7))
    assert (found.state, found.reason, found.offered, found.coverage) == (state, "why", True, 0.5)
    assert found.answer(NOW) == {
        "state": str(state),
        "reason": "why",
        "generation": 5,
        "last_seq": 8,
        "age": 7.0,
        "coverage": 0.5,
        "health": "unknown",
        "offered": True,
    }


def test_a_stale_stream_is_offered_until_its_time_is_over() -> None:
    assert standing(stream(StreamState.STALE, since=STALE_AFTER - 2)).offered
    found = standing(stream(StreamState.STALE, since=STALE_AFTER))
    assert (found.state, found.offered) == (StreamState.STALE, False)


def test_a_stream_of_which_ingest_says_nothing_any_more_is_stale() -> None:
    assert standing(stream(), silence=STALE_AFTER - 1).state is StreamState.LIVE
    found = standing(stream(), silence=STALE_AFTER)
    assert (found.state, found.offered, found.reason) == (
        StreamState.STALE,
        False,
        "ingest has said nothing for 30 s",
    )
    gone = standing(None, silence=STALE_AFTER)
    assert (gone.state, gone.offered, gone.reason) == (StreamState.STALE, False, "no ingest listens to it")
    assert standing(None, silence=1.0).state is StreamState.UNKNOWN


def test_po_09_idle_is_not_stale() -> None:
    found = standing(stream(last_message_at=NOW - 7200))
    assert (found.state, found.offered, found.answer(NOW)["age"]) == (StreamState.LIVE, True, 7200.0)


def test_an_engine_whose_events_are_posted_has_no_stream_and_is_offered() -> None:
    found = standing(None, silence=1e6, record=engine(endpoints={}))
    assert (found.state, found.offered) == (StreamState.UNKNOWN, True)


def test_what_was_hidden_stays_hidden_until_the_publisher_is_heard_again() -> None:
    hidden = standing(stream(StreamState.STALE, since=99))
    back = standing(stream(StreamState.UNKNOWN), before=hidden)
    assert (back.state, back.offered, back.reason) == (
        StreamState.UNKNOWN,
        False,
        "nothing heard since the connection came back",
    )
    assert not standing(stream(StreamState.UNKNOWN), before=back).offered
    assert standing(stream(StreamState.LIVE), before=back).offered
    new_life = Publisher(generation=9)
    assert standing(stream(StreamState.UNKNOWN, generation=9), before=hidden, publisher=new_life).offered


def test_a_record_of_an_earlier_registration_says_nothing_of_this_one() -> None:
    found = standing(stream(StreamState.STALE, since=99, generation=4))
    assert (found.state, found.offered) == (StreamState.UNKNOWN, True)


def test_a_dead_engine_is_not_offered_and_comes_back_when_it_is_healthy() -> None:
    found = standing(stream(), liveness=LivenessState.DEAD)
    assert (found.offered, found.dead, found.health, found.reason) == (False, True, "dead", "health check: refused")
    assert standing(stream(), liveness=LivenessState.ALIVE, before=found).offered
    assert standing(stream(StreamState.UNKNOWN), before=found).offered


def test_a_router_without_nats_answers_from_what_it_knew_and_says_so() -> None:
    found = standing(stream(), silence=999.0, following=Following.DISCONNECTED)
    assert (found.state, found.offered) == (StreamState.STALE, True)
    assert "lost NATS" in found.reason
    hidden = standing(stream(StreamState.STALE, since=99))
    assert not standing(stream(), following=Following.DISCONNECTED, before=hidden).offered


def test_a_router_that_is_catching_up_says_recovering() -> None:
    assert standing(stream(), following=Following.CATCHING_UP).state is StreamState.RECOVERING
    assert standing(stream(StreamState.GAPPED), following=Following.CATCHING_UP).state is StreamState.GAPPED


def test_a_publisher_older_than_the_streams_history_is_gapped() -> None:
    assert standing(stream(), incomplete_before=6).state is StreamState.GAPPED
    assert standing(stream(), incomplete_before=5).state is StreamState.LIVE
    assert standing(stream(), incomplete_before=6, publisher=Publisher(generation=7)).state is StreamState.LIVE


# Offered or not, in queries.


def stored(holder: Worker | Location, tier: Tier = Tier.NPU) -> IndexStored:
    contents = content_hashes(token_bytes(list(range(12))), BLOCK).tobytes()
    teacher = Worker("a", 0) if isinstance(holder, Location) else None
    return IndexStored(holder, tier, pack_hashes([1, 2, 3]), None, contents, 0, BLOCK, False, teacher)


def filled() -> Spaces:
    spaces = Spaces(PlainIndex, stale_after=STALE_AFTER)
    engines = {("a", 0): engine("a"), ("b", 0): engine("b")}
    spaces.set_registry(Registry(engines, {"pool": POOL}))
    events: list[tuple[str, str, IndexEvent]] = [
        ("engine", "a", stored(Worker("a", 0))),
        ("pool", "pool", stored(Location("pool", "host-b"), Tier.CPU)),
    ]
    for number, (source, name, event) in enumerate(events, 1):
        group = IndexGroup(number, source, name, 0, 5 if source == "engine" else 1, 1, 1, 1.0, [event])  # type: ignore[arg-type]
        for _ in spaces.apply(IndexBatch(WIRE_VERSION, MODEL, "default", [group])):
            pass
    return spaces


def look(spaces: Spaces, words: dict[str, StreamState], dead: str = "") -> bool:
    def heard(key: tuple[str, str, int]) -> Heard:
        word = words.get(key[1], StreamState.LIVE)
        return Heard(stream(word, since=99.0), 0.0)

    def liveness(instance_id: str, rank: int) -> Liveness | None:
        return Liveness(instance_id, rank, LivenessState.DEAD, 1.0, 1.0) if instance_id == dead else None

    changed = spaces.standings.update(spaces.registry, spaces.publishers, heard, liveness, Following.CURRENT, 0, NOW)
    if changed:
        spaces.standings_changed()
    return changed


def counts(spaces: Spaces) -> dict[str, tuple[int, ...]]:
    space = spaces.find(MODEL, "default")
    assert space is not None
    found = space.match(prefix_keys(content_hashes(token_bytes(list(range(12))), BLOCK)).tobytes())
    return {engine.instance_id: tuple(coverage) for engine, coverage in zip(space.engines, found, strict=True)}


def test_the_blocks_of_a_stale_engine_are_not_offered_and_come_back_with_it() -> None:
    spaces = filled()
    everything = {"a": (3, 0, 0, 0, 0), "b": (0, 3, 0, 0, 0)}
    assert not look(spaces, {})
    assert counts(spaces) == everything
    assert look(spaces, {"a": StreamState.STALE})
    assert counts(spaces) == {"a": (0, 0, 3, 0, 0), "b": (0, 3, 0, 0, 0)}, "the pool's are there for it all the same"
    assert look(spaces, {})
    assert counts(spaces) == everything


def test_po_08_the_blocks_of_a_stale_pool_are_ignored_and_phase_one_goes_on() -> None:
    spaces = filled()
    assert look(spaces, {"pool": StreamState.STALE})
    assert counts(spaces) == {"a": (3, 0, 0, 0, 0), "b": (0, 0, 0, 0, 0)}
    assert look(spaces, {})
    assert counts(spaces)["b"] == (0, 3, 0, 0, 0)


def test_a_dead_engine_is_offered_nothing_not_even_what_pools_have() -> None:
    spaces = filled()
    assert look(spaces, {}, dead="b")
    assert counts(spaces) == {"a": (3, 0, 0, 0, 0), "b": (0, 0, 0, 0, 0)}
    assert look(spaces, {})
    assert counts(spaces)["b"] == (0, 3, 0, 0, 0)


@pytest.mark.parametrize("shape", [query_answer, mooncake_answer])
def test_answers_carry_the_standing_of_every_rank_beside_what_they_had(shape: Any) -> None:
    spaces = filled()
    look(spaces, {"a": StreamState.GAPPED})
    space = spaces.find(MODEL, "default")
    assert space is not None
    keys = prefix_keys(content_hashes(token_bytes(list(range(12))), BLOCK)).tobytes()
    answer = shape("default", space.engines, space.match(keys), BLOCK, spaces.standings)["default"]["a"]
    assert answer["longest_matched"] == 12
    assert set(answer["streams"]) == set(answer["DP"]) == {"0"}
    assert answer["streams"]["0"]["state"] == "gapped"
    assert answer["streams"]["0"]["offered"] is True


def test_an_unregistered_publisher_has_no_standing() -> None:
    standings = Standings(STALE_AFTER)
    found = standings.answer("engine", "nobody", 0)
    assert (found["state"], found["offered"], found["age"]) == ("unknown", True, None)
    assert replace(standings.of_engine("nobody", 0), hidden=True).offered is False
