"""Who claims what: the blocks of one holder in one tier, and the engine hashes of one domain.

Numbers above one are kept apart, because almost every block is stored once and under one name.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Shelf:
    """Blocks of one holder in one tier. claims: engine hash -> prefix key."""

    holder: int
    tier: int
    domain: int
    claims: dict[int, int] = field(default_factory=dict)
    repeats: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    doubled: int = 0

    def blocks(self) -> int:
        """Distinct prefix keys."""
        return len(self.claims) - self.doubled

    def add(self, name: int, key: int, held: bool) -> None:
        """A new claim. held: another name claims the key already."""
        self.claims[name] = key
        if held:
            self.copies[key] = self.copies.get(key, 0) + 1
            self.doubled += 1

    def repeat(self, name: int) -> None:
        """One more store of a claim."""
        self.repeats[name] = self.repeats.get(name, 0) + 1

    def undo_repeat(self, name: int) -> bool:
        """Take one store back; False when it is the only one."""
        repeats = self.repeats.get(name, 0)
        if repeats > 1:
            self.repeats[name] = repeats - 1
        elif repeats:
            del self.repeats[name]
        return repeats > 0

    def take(self, name: int) -> tuple[int, bool]:
        """Drop a claim with all its stores; its key, and whether the holder still has that under another name."""
        key = self.claims.pop(name)
        self.repeats.pop(name, None)
        copies = self.copies.get(key, 0)
        if not copies:
            return key, False
        self.doubled -= 1
        if copies > 1:
            self.copies[key] = copies - 1
        else:
            del self.copies[key]
        return key, True


@dataclass(slots=True)
class Names:
    """Engine hashes of one domain. keys: engine hash -> prefix key; more: claims under a hash beyond the first."""

    keys: dict[int, int] = field(default_factory=dict)
    more: dict[int, int] = field(default_factory=dict)

    def add(self, name: int, key: int) -> bool:
        """One more claim under this hash, which means `key` from now on; whether the hash is new."""
        new = name not in self.keys
        if not new:
            self.more[name] = self.more.get(name, 0) + 1
        self.keys[name] = key
        return new

    def drop(self, name: int) -> None:
        """One claim less."""
        more = self.more.get(name, 0)
        if not more:
            del self.keys[name]
        elif more > 1:
            self.more[name] = more - 1
        else:
            del self.more[name]
