"""One DP rank of a simulated engine, pure: which blocks it holds, what a prompt hits, which events follow.

Order of events, blocks and evictions follow vLLM's scheduler step by step (compared with a real engine's capture).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvroute.sim.block_hashes import hash_blocks, low64, none_hash
from kvroute.sim.block_pool import BlockPool
from kvroute.sim.own_cpu_tier import OwnCpuTier
from kvroute.sim.true_cache import TrueCache
from kvroute.sim.vllm_events import (
    FULL_ATTENTION,
    GPU,
    OFFLOAD_CONNECTOR_MEDIUM,
    POOL_CONNECTOR_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
)

MAIN_GROUP = 0


@dataclass(frozen=True)
class RankSpec:
    """block_size: tokens. npu_blocks: usable blocks. own_cpu_blocks: 0 = no CPU tier of its own. hash_seed:
    PYTHONHASHSEED."""

    block_size: int
    npu_blocks: int
    own_cpu_blocks: int = 0
    hash_seed: str | None = None


@dataclass
class Run:
    """A request being served: its tokens (output appended as it comes), hashes of whole blocks and physical blocks."""

    tokens: list[int]
    cache_salt: str | None
    lora_name: str | None
    hashes: list[bytes]
    npu_hits: int
    external_hits: int
    blocks: list[int] = field(default_factory=list)
    named: int = 0
    reserved: int = 0


class EngineRank:
    """Block bookkeeping of one DP rank. Call ``start``, ``step_events``, ``decode``, ``step_events``, ``finish``.

    wire_name: how events name a block in a medium. announce_hits: blocks that a prompt hits are announced again.
    """

    def __init__(
        self,
        spec: RankSpec,
        wire_name: Callable[[bytes, str], int | bytes] = lambda block_hash, medium: low64(block_hash),
        *,
        announce_hits: bool = False,
    ) -> None:
        self.spec = spec
        self._wire_name = wire_name
        self._announce_hits = announce_hits
        self.pool = BlockPool(spec.npu_blocks)
        self.true_cache = TrueCache(spec.block_size, spec.npu_blocks)
        self.own_cpu = OwnCpuTier(spec.own_cpu_blocks) if spec.own_cpu_blocks else None
        self._root = none_hash(spec.hash_seed)
        self._reserved = 0
        self._pending: list[EngineEvent] = []
        self._copying: list[EngineEvent] = []
        self._copied: list[EngineEvent] = []

    def hash_prompt(self, tokens: Sequence[int], cache_salt: str | None, lora_name: str | None) -> list[bytes]:
        """Engine hashes of a prompt's whole blocks."""
        return hash_blocks(tokens, self.spec.block_size, root=self._root, cache_salt=cache_salt, lora_name=lora_name)

    def usable_blocks(self, prompt_length: int) -> int:
        """Blocks of a prompt that may come from a cache: at least one token is always computed."""
        return max(0, prompt_length - 1) // self.spec.block_size

    def npu_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading hashes lie on the device."""
        for position, block_hash in enumerate(hashes):
            if self.pool.find(block_hash) is None:
                return position
        return len(hashes)

    def start(
        self,
        prompt: Sequence[int],
        output_limit: int,
        *,
        hashes: list[bytes],
        external_hits: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> Run | None:
        """Take blocks for a prompt, or None while too few are free for it and its output.

        external_hits: blocks after the device prefix that a pool delivers. The engine's own CPU tier is consulted here.
        """
        usable = hashes[: self.usable_blocks(len(prompt))]
        npu_hits = self.npu_prefix(usable)
        if self.own_cpu:
            external_hits = self.own_cpu.prefix(usable[npu_hits:])
        run = Run(
            list(prompt), cache_salt, lora_name, list(hashes), npu_hits, min(external_hits, len(usable) - npu_hits)
        )
        hit_blocks = [block for block in map(self.pool.find, usable[:npu_hits]) if block is not None]
        total = -(-(len(prompt) + output_limit) // self.spec.block_size)
        free_after_hits = self.pool.free_blocks - sum(map(self.pool.is_free, hit_blocks))
        if total - npu_hits > free_after_hits - self._reserved:
            return None
        self.pool.touch(hit_blocks)
        run.blocks, run.named = hit_blocks, npu_hits
        run.reserved = total - npu_hits
        self._reserved += run.reserved
        if self._announce_hits and npu_hits:
            self._pending.append(self._stored(run, 0, npu_hits))
        self._grow(run)
        self._offload(run)
        return run

    def decode(self, run: Run, output: Sequence[int]) -> None:
        """Add output tokens; the last one's KV is never computed."""
        run.tokens.extend(output[:-1])
        run.hashes = hash_blocks(
            run.tokens,
            self.spec.block_size,
            root=self._root,
            cache_salt=run.cache_salt,
            lora_name=run.lora_name,
            known=run.hashes,
        )
        self._grow(run)
        self._offload(run)

    def finish(self, run: Run) -> None:
        """Release a request's blocks; its tail will be evicted first."""
        self.pool.release(reversed(run.blocks))
        self._reserved -= run.reserved
        run.reserved = 0

    def pooled(self, run: Run, positions: Sequence[int]) -> None:
        """A pool connector has put these blocks of a run: its events, one per block, go out with the next step."""
        size = self.spec.block_size
        for position in positions:
            self._copied.append(
                BlockStored(
                    block_hashes=[low64(run.hashes[position])],
                    parent_block_hash=low64(run.hashes[position - 1]) if position else None,
                    token_ids=run.tokens[position * size : (position + 1) * size],
                    block_size=size,
                    lora_id=None,
                    medium=POOL_CONNECTOR_MEDIUM,
                    lora_name=None,
                )
            )

    def step_events(self) -> list[EngineEvent]:
        """What the engine publishes at the end of a step; copies that were under way are reported one step later."""
        events = self._pending + self._copied
        self._pending, self._copied, self._copying = [], self._copying, []
        return events

    def reset_prefix_cache(self) -> bool:
        """Empty the device tier, not the CPU tier; False while requests run. The event waits for the next step."""
        if not self.pool.reset():
            return False
        self._pending.append(AllBlocksCleared())
        return True

    def _grow(self, run: Run) -> None:
        """Allocate blocks up to the run's length and name those that are full."""
        needed = -(-len(run.tokens) // self.spec.block_size) - len(run.blocks)
        if needed > 0:
            blocks, evicted = self.pool.allocate(needed)
            run.blocks.extend(blocks)
            run.reserved -= needed
            self._reserved -= needed
            self._pending.extend(
                BlockRemoved(block_hashes=[low64(gone)], medium=GPU, group_idx=MAIN_GROUP) for gone in evicted
            )
        if run.named == len(run.hashes):
            return
        first, last = run.named, len(run.hashes)
        for position in range(first, last):
            self.pool.assign(run.blocks[position], run.hashes[position])
        cached = self.pool.cached_hashes if self.true_cache.is_full else None
        self.true_cache.note(run.hashes, first, last, run.tokens, run.cache_salt, run.lora_name, cached)
        run.named = last
        self._pending.append(self._stored(run, first, last))

    def _stored(self, run: Run, first: int, last: int) -> BlockStored:
        """Device blocks of a run from position ``first`` up to ``last``, as an event."""
        size = self.spec.block_size
        return BlockStored(
            block_hashes=[low64(block_hash) for block_hash in run.hashes[first:last]],
            parent_block_hash=low64(run.hashes[first - 1]) if first else None,
            token_ids=run.tokens[first * size : last * size],
            block_size=size,
            lora_id=None,
            medium=GPU,
            lora_name=run.lora_name,
            extra_keys=[_event_keys(run, position) for position in range(first, last)],
            group_idx=MAIN_GROUP,
            kv_cache_spec_kind=FULL_ATTENTION,
        )

    def _offload(self, run: Run) -> None:
        """Copy a run's blocks to the CPU tier; evictions show at once, stores when the copy is done."""
        if not self.own_cpu:
            return
        self.own_cpu.touch(run.hashes)
        new, evicted = self.own_cpu.store(run.hashes)
        if evicted:
            self._pending.append(
                BlockRemoved(
                    block_hashes=[self._wire_name(gone, OFFLOAD_CONNECTOR_MEDIUM) for gone in evicted],
                    medium=OFFLOAD_CONNECTOR_MEDIUM,
                    group_idx=MAIN_GROUP,
                )
            )
        self._copying.extend(
            BlockStored(
                block_hashes=[self._wire_name(block_hash, OFFLOAD_CONNECTOR_MEDIUM)],
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium=OFFLOAD_CONNECTOR_MEDIUM,
                lora_name=None,
                group_idx=MAIN_GROUP,
            )
            for block_hash in new
        )


def _event_keys(run: Run, position: int) -> tuple[str, ...] | None:
    """Extra keys as the event shows them: bare, the salt in the first block only."""
    keys = ((run.lora_name,) if run.lora_name else ()) + ((run.cache_salt,) if run.cache_salt and position == 0 else ())
    return keys or None
