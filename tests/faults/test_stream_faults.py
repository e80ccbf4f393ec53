"""Every way in which an engine is known to misbehave, through all services: afterwards the index equals the engine's
cache, or the stream says `gapped`."""

import asyncio
from collections.abc import Iterator

import pytest

from kvroute.embedded import EmbeddedStack
from kvroute.sim.fault_names import FAULTS
from tests.e2e.conftest import StackThread
from tests.faults.stream_support import BLOCK, Subject, measured

# What no stream can show, because the engine keeps it to itself: an audit against cached_tokens finds it.
UNSEEN = {"lost-removals", "unsent-clear"}
TRUE = [
    ("restart=12",),
    ("restart-past=12",),
    ("clock-back=12",),
    ("blink=10",),
    ("drop=0.2",),
    ("duplicate",),
    ("reorder",),
    ("poison",),
    ("bad-frames",),
    ("wrong-rank",),
    ("foreign-rank",),
    ("no-topic", "drop=0.2"),
    ("no-end", "drop=0.2"),
    ("truncated-replay=3", "drop=0.2"),
    ("lossy-replay=0.2", "drop=0.2"),
    ("reannounce",),
    ("absent-removals",),
    ("restart=12", "drop=0.2"),
    ("restart-past=12", "drop=0.2", "no-topic"),
]
GAPPED = [("unsendable=0.2",), ("no-replay", "drop=0.2"), ("wrong-block-size",), ("short-replay=1", "blink=5")]


@pytest.fixture(scope="module")
def stack() -> Iterator[EmbeddedStack]:
    """The whole system with a short patience."""
    thread = StackThread(KVROUTE_INGEST__REPLAY_TIMEOUT="0.5", KVROUTE_INGEST__VERIFY_INTERVAL="1.0")
    yield thread.stack.result(timeout=90)
    thread.stop()


def test_every_fault_of_the_simulated_engine_is_tried_here() -> None:
    tried = {text.partition("=")[0] for faults in (*TRUE, *GAPPED) for text in faults}
    others = {"relay-reset", "bytes-offload"}
    assert tried | others | UNSEEN == set(FAULTS)


@pytest.mark.parametrize("faults", TRUE, ids="+".join)
async def test_the_index_equals_the_engines_cache_afterwards(stack: EmbeddedStack, faults: tuple[str, ...]) -> None:
    async with Subject(stack, *faults) as subject:
        await subject.register()
        await subject.ask(25)
        _, false, missing, seconds = await subject.settle("live")
        assert (false, missing) == (0, 0)
        status = await subject.status()
        assert status["coverage"] == 1.0
        assert status["messages"]["pending"] == 0
        measured("+".join(faults), seconds)


@pytest.mark.parametrize("faults", GAPPED, ids="+".join)
async def test_a_stream_that_cannot_be_made_good_says_gapped(stack: EmbeddedStack, faults: tuple[str, ...]) -> None:
    async with Subject(stack, *faults) as subject:
        await subject.register()
        await subject.ask(25)
        state, _, _, seconds = await subject.settle("gapped")
        assert state == "gapped"
        assert (await subject.status())["reason"]
        measured("+".join(faults), seconds)


@pytest.mark.parametrize("fault", sorted(UNSEEN))
async def test_t19_what_an_engine_keeps_to_itself_leaves_the_stream_as_it_is(stack: EmbeddedStack, fault: str) -> None:
    async with Subject(stack, fault) as subject:
        await subject.register()
        await subject.ask(25)
        subject.engine.ranks[0].rank.reset_prefix_cache()
        assert (await subject.status())["state"] == "live"


async def test_t02_a_relay_that_counts_anew_wipes_nothing_and_says_gapped(stack: EmbeddedStack) -> None:
    async with Subject(stack, "relay-reset=6", npu_blocks=512) as subject:
        await subject.register()
        await subject.ask(6)
        await subject.settle("live")
        warm = subject.prompts[0][: 2 * BLOCK]
        await subject.ask(4, shared=warm)
        await subject.settle("gapped", equal=True)
        status = await subject.status()
        assert (status["restarts"], status["counter_resets"]) == (0, 1)


async def test_t23_offload_events_with_long_hashes_and_no_tokens_move_tiers(stack: EmbeddedStack) -> None:
    async with Subject(stack, "bytes-offload", npu_blocks=24, own_cpu_blocks=200) as subject:
        await subject.register(own_tiers=["cpu"])
        await subject.ask(25)
        await subject.ask(1)
        await subject.settle("live")


async def test_t11_an_engine_that_was_busy_before_it_was_registered_is_known_completely(stack: EmbeddedStack) -> None:
    async with Subject(stack) as subject:
        await subject.ask(20)
        await subject.register()
        _, _, _, seconds = await subject.settle("live")
        measured("late join", seconds)


async def test_t11_a_late_joiner_with_a_short_memory_is_known_in_part_and_never_falsely(stack: EmbeddedStack) -> None:
    async with Subject(stack, "short-replay=4", npu_blocks=512) as subject:
        await subject.ask(20)
        await subject.register()
        await subject.ask(2)
        state, false, missing, _ = await subject.settle("gapped")
        assert (state, false) == ("gapped", 0)
        assert missing > 0
        assert 0 < (await subject.status())["coverage"] < 1


async def test_t01_a_restart_without_any_replay_clears_as_soon_as_the_numbers_go_back(stack: EmbeddedStack) -> None:
    async with Subject(stack, "restart=12") as subject:
        await subject.register(replay_endpoint=None)
        await subject.ask(12)
        await asyncio.wait_for(subject.engine.ranks[0].publisher.subscribed(), 10)
        await subject.settle("unknown")
        await subject.ask(5)
        await subject.settle("live")
        assert (await subject.status())["restarts"] == 1


async def test_t04_registering_again_starts_from_what_the_engine_still_tells(stack: EmbeddedStack) -> None:
    async with Subject(stack) as subject:
        await subject.register()
        await subject.ask(10)
        await subject.settle("live")
        for body in subject.engine.registrations():
            await subject.router.post("/unregister", json=body)
        await subject.register()
        await subject.settle("live")


async def test_t30_ranks_with_sockets_of_their_own_are_followed_each_for_itself(stack: EmbeddedStack) -> None:
    async with Subject(stack, "drop=0.2", dp_size=3) as subject:
        await subject.register()
        for dp_rank in range(3):
            await subject.ask(8, dp_rank=dp_rank)
        for dp_rank in range(3):
            await subject.settle("live", dp_rank=dp_rank)


async def test_sq_08_live_messages_are_not_late_while_a_long_replay_runs(stack: EmbeddedStack) -> None:
    async with Subject(stack, npu_blocks=400) as subject, Subject(stack) as other:
        await other.register()
        await subject.ask(300)
        await subject.register()
        await other.ask(10)
        _, _, _, seconds = await other.settle("live", seconds=5)
        assert seconds < 2
        await subject.settle("live")
