"""vLLM batches written as a given release writes them, byte for byte; for simulated engines and tests."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

NEWEST: Final = "0.33.0"

STORED_FIELDS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
# These always travel; the others only when set (as a map) or as nil (as an array).
STORED_REQUIRED: Final = 7
REMOVED_REQUIRED: Final = 2


class Form(NamedTuple):
    """What a release sends. stored, removed: how many of the fields it knows. rank: whether a batch names a DP rank."""

    since: tuple[int, ...]
    maps: bool
    stored: int
    removed: int
    rank: bool = True


FORMS: Final = (
    Form((0, 9, 0), maps=False, stored=5, removed=1, rank=False),
    Form((0, 9, 1), maps=False, stored=5, removed=1),
    Form((0, 10, 2), maps=False, stored=6, removed=2),
    Form((0, 14), maps=False, stored=7, removed=2),
    Form((0, 17), maps=False, stored=8, removed=2),
    Form((0, 20), maps=False, stored=9, removed=3),
    Form((0, 22), maps=False, stored=11, removed=3),
    Form((0, 24), maps=True, stored=11, removed=3),
    Form((0, 26), maps=True, stored=12, removed=4),
    Form((0, 29), maps=True, stored=13, removed=5),
    Form((0, 30), maps=True, stored=14, removed=5),
    Form((0, 33), maps=True, stored=15, removed=5),
)

_encoder = msgspec.msgpack.Encoder()


@cache
def form_of(release: str) -> Form:
    """The wire form of a release like ``0.23.0``. Raises ValueError for one without KV events."""
    version = tuple(int(part) for part in release.split(".")[:3])
    known = [form for form in FORMS if form.since <= version]
    if not known:
        raise ValueError(f"vLLM {release} publishes no KV events: name 0.9.0 or newer")
    return known[-1]


def encode_batch(
    timestamp: float, events: Sequence[Mapping[str, Any]], dp_rank: int | None = 0, release: str = NEWEST
) -> bytes:
    """A batch of events given as maps of field names, with ``type`` among them; fields a release lacks are left out.

    Raises KeyError for an unknown type or a missing required field.
    """
    form = form_of(release)
    written = [_event(event, form) for event in events]
    return _encoder.encode([timestamp, written, dp_rank] if form.rank else [timestamp, written])


def _event(event: Mapping[str, Any], form: Form) -> Any:
    kinds = _structures(form)
    kind, known, required = kinds[event["type"]]
    values = {name: event[name] for name in known[:required]}
    return kind(**values, **{name: event[name] for name in known[required:] if name in event})


@cache
def _structures(form: Form) -> dict[str, tuple[Any, tuple[str, ...], int]]:
    return {
        "BlockStored": _structure("BlockStored", STORED_FIELDS[: form.stored], STORED_REQUIRED, form),
        "BlockRemoved": _structure("BlockRemoved", REMOVED_FIELDS[: form.removed], REMOVED_REQUIRED, form),
        "AllBlocksCleared": _structure("AllBlocksCleared", (), 0, form),
    }


def _structure(tag: str, names: tuple[str, ...], required: int, form: Form) -> tuple[Any, tuple[str, ...], int]:
    required = min(required, len(names))
    fields: list[Any] = [(name, Any) for name in names[:required]]
    fields += [(name, Any, None) for name in names[required:]]
    kind = msgspec.defstruct(tag, fields, tag=tag, tag_field="type", array_like=not form.maps, omit_defaults=True)
    return kind, names, required
