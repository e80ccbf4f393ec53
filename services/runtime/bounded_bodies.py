"""Large bodies are looked at before objects are made of them: sixty megabytes of empty lists are gigabytes of memory.

Small bodies go to the decoders directly; what they can become is bounded by their size. A large JSON body is counted
through; a large msgpack body is taken apart field by field, lists of integers first, as these are what bodies are made
of.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.wire.raw import is_array, is_map

LARGE_BYTES = 1024 * 1024
MAX_CONTAINERS = 400_000
MAX_NAMES = 2_000_000
MAX_VALUES = 8_388_608
MAX_FIELDS = 1_000
MAX_ITEMS = 65_536

_NO_CONTAINER = bytes(byte for byte in range(256) if not (is_array(byte) or is_map(byte)))

_anything = msgspec.msgpack.Decoder()
_integers = msgspec.msgpack.Decoder(list[int])
_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_fields = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])


class TooComplexError(ValueError):
    """A body that would become far more objects than any good one."""


def check_json(body: bytes) -> None:
    """Refuse a large JSON body that is made of too many parts. Raises TooComplexError."""
    if len(body) <= LARGE_BYTES:
        return
    limits = ((b"[{", MAX_CONTAINERS, "lists and objects"), (b":", MAX_NAMES, "fields"), (b",", MAX_VALUES, "values"))
    for letters, limit, what in limits:
        # Letters inside of texts count as well; no good body comes near.
        if sum(body.count(letters[at : at + 1]) for at in range(len(letters))) > limit:
            raise TooComplexError(f"it has more than {limit} {what}; send less at once")


def read_msgpack(body: bytes) -> Any:
    """Decode a msgpack body. Raises TooComplexError, msgspec.DecodeError."""
    if len(body) <= LARGE_BYTES:
        return _anything.decode(body)
    if not is_map(body[0]):
        return None
    budget = _Budget()
    return {name: budget.value(raw, events=True) for name, raw in _named(msgspec.Raw(body)).items()}


@dataclass(slots=True)
class _Budget:
    """How many lists and maps may still be made."""

    left: int = MAX_CONTAINERS

    def value(self, raw: msgspec.Raw, events: bool) -> Any:
        """A field's value; with ``events`` also a list of maps whose own fields are looked at one by one."""
        view = memoryview(raw)
        if is_array(view[0]):
            try:
                return _integers.decode(raw)
            except msgspec.ValidationError:
                pass
        elif not is_map(view[0]):
            return _anything.decode(raw)
        # An upper bound: bytes of numbers and texts may look like the beginning of a list.
        needed = len(bytes(view).translate(None, _NO_CONTAINER))
        if needed <= self.left:
            self.left -= needed
            return _anything.decode(raw)
        if events and is_array(view[0]) and _length(view) <= MAX_ITEMS:
            return [self._item(item) for item in _items.decode(raw)]
        raise TooComplexError(f"it has more than {MAX_CONTAINERS} lists and maps; send less at once")

    def _item(self, raw: msgspec.Raw) -> Any:
        if not is_map(memoryview(raw)[0]):
            return self.value(raw, events=False)
        return {name: self.value(value, events=False) for name, value in _named(raw).items()}


def _named(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    fields = _length(memoryview(raw))
    if fields > MAX_FIELDS:
        raise TooComplexError(f"a map has {fields} fields, at most {MAX_FIELDS} are read")
    return _fields.decode(raw)


def _length(view: memoryview) -> int:
    """How many elements a msgpack list or map claims."""
    if view[0] < 0xA0:
        return view[0] & 0x0F
    return int.from_bytes(view[1 : 3 if view[0] in (0xDC, 0xDE) else 5], "big")
