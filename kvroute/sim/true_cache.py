"""What a simulated engine really holds on its device, with the tokens: an audit compares it with what an index says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvroute.sim.block_hashes import low64


@dataclass(frozen=True, slots=True)
class _Content:
    parent: bytes | None
    tokens: tuple[int, ...]
    cache_salt: str | None
    lora_name: str | None


class TrueCache:
    """Contents of blocks by their hash; those of evicted blocks are forgotten in bulk. capacity: blocks of the rank."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._most = 2 * capacity + 1024
        self._contents: dict[bytes, _Content] = {}

    def note(
        self,
        hashes: Sequence[bytes],
        first: int,
        last: int,
        tokens: Sequence[int],
        cache_salt: str | None,
        lora_name: str | None,
        cached: set[bytes] | None = None,
    ) -> None:
        """Blocks from position first up to last of a chain have been filled. cached: what the device holds."""
        size = self._block_size
        for position in range(first, last):
            self._contents[hashes[position]] = _Content(
                hashes[position - 1] if position else None,
                tuple(tokens[position * size : (position + 1) * size]),
                cache_salt,
                lora_name,
            )
        if cached is not None and self.is_full:
            self._contents = {name: content for name, content in self._contents.items() if name in cached}

    @property
    def is_full(self) -> bool:
        """Whether evicted blocks should be forgotten at the next chance."""
        return len(self._contents) > self._most

    def report(self, cached: set[bytes]) -> dict[str, Any]:
        """The blocks that a request could hit, as chains from their beginning: every one is in some chain.

        blocks: held in all; unreachable: of those, behind a hole, so that no request can hit them.
        """
        parents = {content.parent for name, content in self._contents.items() if name in cached}
        chains: list[dict[str, Any]] = []
        reachable: set[bytes] = set()
        for leaf in cached - parents:
            names = self._chain(leaf, cached)
            if names:
                reachable.update(names)
                chains.append(self._describe(names))
        return {
            "block_size": self._block_size,
            "blocks": len(cached),
            "unreachable": len(cached - reachable),
            "chains": chains,
        }

    def _chain(self, name: bytes, cached: set[bytes]) -> list[bytes]:
        """From the chain's start to a block, empty when something between is not held."""
        names: list[bytes] = []
        at: bytes | None = name
        while at is not None:
            content = self._contents.get(at)
            if content is None or at not in cached:
                return []
            names.append(at)
            at = content.parent
        return names[::-1]

    def _describe(self, names: list[bytes]) -> dict[str, Any]:
        contents = [self._contents[name] for name in names]
        return {
            "token_ids": [token for content in contents for token in content.tokens],
            "block_ids": [low64(name) for name in names],
            "cache_salt": contents[0].cache_salt,
            "lora_name": contents[0].lora_name,
        }
