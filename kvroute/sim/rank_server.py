"""One DP rank at work: prompts are prefilled one after the other, decoded side by side, and tell their events."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvroute.sim.engine_rank import EngineRank, RankSpec, Run
from kvroute.sim.faults import HOUR, RESTARTS, RankFaults
from kvroute.sim.pool_client import PoolClient, PoolUnavailableError
from kvroute.sim.pool_store import CPU, Placed, object_key
from kvroute.sim.publisher import EventPublisher
from kvroute.sim.timing import PrefillWork, Speed, prefill_seconds
from kvroute.sim.vllm_events import encode_batch

BLINK_SECONDS = 1.0


@dataclass(frozen=True)
class Prompt:
    """What a client asked for."""

    tokens: Sequence[int]
    output_limit: int = 16
    cache_salt: str | None = None
    lora_name: str | None = None


@dataclass(frozen=True)
class FirstToken:
    """What is known when a prompt's first token is there: hits in blocks by tier, and seconds since it was sent in."""

    npu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    cached_tokens: int
    computed_tokens: int
    seconds: float


@dataclass
class Ticket:
    """A prompt on its way. Await ``first_token`` (which carries a failure, if any), then ``output``."""

    prompt: Prompt
    sent_at: float = field(default_factory=time.monotonic)
    first_token: "asyncio.Future[FirstToken]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    output: "asyncio.Future[list[int]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


def output_tokens(prompt: Prompt) -> list[int]:
    """The answer of a model that always answers alike: printable ASCII, a function of the prompt alone."""
    state = sum(prompt.tokens) + 31 * len(prompt.tokens)
    return [ord("a") + (state * 7919 + position * 104_729) % 26 for position in range(prompt.output_limit)]


class RankServer:
    """Serves one DP rank. on_first_token is told of every prompt served, for metrics."""

    def __init__(
        self,
        dp_rank: int,
        model: str,
        spec: RankSpec,
        speed: Speed,
        publisher: EventPublisher,
        pool: PoolClient | None,
        on_first_token: Callable[[int, Prompt, FirstToken], None],
        faults: RankFaults | None = None,
    ) -> None:
        self.dp_rank = dp_rank
        self.model = model
        self.speed = speed
        self.publisher = publisher
        self.faults = faults or RankFaults()
        self.rank = EngineRank(spec, self.faults.wire_name, announce_hits="reannounce" in self.faults)
        self.waiting: asyncio.Queue[Ticket] = asyncio.Queue()
        self.running = 0
        self.pool_failures = 0
        self._pool = pool
        self._on_first_token = on_first_token
        self._freed = asyncio.Event()
        self._decoding: set[asyncio.Task[None]] = set()
        self._prefilling = asyncio.create_task(self._prefill_all())

    @property
    def load(self) -> int:
        """Prompts that wait or run."""
        return self.waiting.qsize() + self.running

    def submit(self, prompt: Prompt) -> Ticket:
        """Queue a prompt. Raises ValueError when it can never fit into the device's blocks."""
        blocks = -(-(len(prompt.tokens) + prompt.output_limit) // self.rank.spec.block_size)
        if blocks > self.rank.spec.npu_blocks:
            raise ValueError(f"prompt and output need {blocks} blocks, this engine has {self.rank.spec.npu_blocks}")
        ticket = Ticket(prompt)
        self.waiting.put_nowait(ticket)
        return ticket

    def publish(self) -> None:
        """End of an engine step: send the events it brought, if any."""
        faults = self.faults
        events = self.rank.step_events()
        if not events or not (events := faults.events(events)):
            return
        if faults.is_unsendable():
            self.publisher.consume()
            return
        self.publisher.publish(encode_batch(faults.now(), events, faults.rank_in_batches(self.dp_rank)))

    def restart(self) -> None:
        """What a crash and restart of the engine process does to an idle rank: all is lost and nobody is told."""
        self.rank = EngineRank(self.rank.spec, self.faults.wire_name, announce_hits="reannounce" in self.faults)
        self.publisher.restart()

    async def close(self) -> None:
        """Stop at once; prompts on their way are cancelled."""
        tasks = [self._prefilling, *self._decoding]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.publisher.close()

    async def _prefill_all(self) -> None:
        while True:
            ticket = await self.waiting.get()
            self.running += 1
            try:
                await self._prefill(ticket)
            except asyncio.CancelledError:
                ticket.first_token.cancel()
                raise
            except Exception as error:
                self.running -= 1
                ticket.first_token.set_exception(error)

    async def _prefill(self, ticket: Ticket) -> None:
        prompt, rank = ticket.prompt, self.rank
        hashes = rank.hash_prompt(prompt.tokens, prompt.cache_salt, prompt.lora_name)
        usable = hashes[: rank.usable_blocks(len(prompt.tokens))]
        while True:
            places = await self._pool_prefix(usable[rank.npu_prefix(usable) :])
            run = rank.start(
                prompt.tokens,
                prompt.output_limit,
                hashes=hashes,
                external_hits=len(places),
                cache_salt=prompt.cache_salt,
                lora_name=prompt.lora_name,
            )
            if run:
                break
            self._freed.clear()
            await self._freed.wait()
        size = rank.spec.block_size
        cached = (run.npu_hits + run.external_hits) * size
        disk = sum(place.medium != CPU for place in places[: run.external_hits])
        local = sum(place.medium == CPU and self._is_local(place) for place in places[: run.external_hits])
        if not self._pool:
            local = run.external_hits
        work = PrefillWork(
            computed=len(prompt.tokens) - cached,
            local_cpu=local * size,
            remote_cpu=(run.external_hits - local - disk) * size,
            disk=disk * size,
        )
        await asyncio.sleep(prefill_seconds(work, self.speed))
        self.publish()
        first = FirstToken(
            npu_blocks=run.npu_hits,
            cpu_blocks=run.external_hits - disk,
            disk_blocks=disk,
            cached_tokens=cached,
            computed_tokens=work.computed,
            seconds=time.monotonic() - ticket.sent_at,
        )
        self._on_first_token(self.dp_rank, prompt, first)
        if not ticket.first_token.done():
            ticket.first_token.set_result(first)
        task = asyncio.create_task(self._decode(ticket, run))
        self._decoding.add(task)
        task.add_done_callback(self._decoding.discard)

    async def _decode(self, ticket: Ticket, run: Run) -> None:
        output = output_tokens(ticket.prompt)
        try:
            put = await self._put(run, 0)
            if len(output) > 1:
                await asyncio.sleep(self.speed.per_output_token * (len(output) - 1))
                self.rank.decode(run, output)
                await self._put(run, put)
                self.publish()
            if not ticket.output.done():
                ticket.output.set_result(output)
        finally:
            self.rank.finish(run)
            self.running -= 1
            if not self.load:
                await self._misbehave_when_idle()
            self._freed.set()
            if not ticket.output.done():
                ticket.output.cancel()

    async def _misbehave_when_idle(self) -> None:
        if (name := self.faults.due(*RESTARTS)) is not None:
            passed = self.publisher.sequence
            if name == "clock-back":
                self.faults.clock_offset = -HOUR
            self.restart()
            reopening = asyncio.create_task(self.publisher.reopen())
            if name == "restart-past":
                for _ in range(passed + 3):
                    self.publisher.remember(encode_batch(self.faults.now(), [], self.dp_rank))
            await reopening
        elif self.faults.due("relay-reset") is not None:
            self.publisher.restart()
        elif self.faults.due("blink") is not None:
            await self.publisher.reopen(BLINK_SECONDS)

    def _is_local(self, place: Placed) -> bool:
        return self._pool is not None and place.backend_id == self._pool.backend_id

    async def _pool_prefix(self, hashes: Sequence[bytes]) -> list[Placed]:
        """Where the leading blocks lie that the pool has."""
        if not self._pool or not hashes:
            return []
        try:
            places = await self._pool.find([object_key(self.model, block_hash) for block_hash in hashes])
        except PoolUnavailableError:
            self.pool_failures += 1
            return []
        prefix: list[Placed] = []
        for place in places:
            if place is None:
                break
            prefix.append(place)
        return prefix

    async def _put(self, run: Run, first: int) -> int:
        """Put a run's blocks from position ``first`` on into the pool; the number of blocks put so far."""
        last = len(run.hashes)
        if not self._pool or first == last:
            return last
        try:
            new = await self._pool.put([object_key(self.model, block_hash) for block_hash in run.hashes[first:last]])
        except PoolUnavailableError:
            self.pool_failures += 1
            return last
        self.rank.pooled(run, [first + offset for offset, stored in enumerate(new) if stored])
        return last
