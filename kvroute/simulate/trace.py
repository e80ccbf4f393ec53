"""Traces in Mooncake form: one JSON object a line with timestamp (ms), input_length (tokens) and hash_ids."""

from dataclasses import dataclass
from pathlib import Path

import orjson

MAX_REQUESTS = 1_000_000


class TraceError(ValueError):
    """A trace that cannot be read; the text names the line and the field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """at: seconds. tokens: prompt length. blocks: ids of the prompt's blocks, each standing for its whole prefix."""

    at: float
    tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, block_size: int) -> list[TraceRequest]:
    """Requests in order of time; only whole blocks are kept. Raises TraceError and OSError."""
    requests = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > MAX_REQUESTS:
                raise TraceError(f"{path.name} has more than {MAX_REQUESTS} requests")
            if line.strip():
                requests.append(_request(line, f"{path.name} line {number}", block_size))
    if not requests:
        raise TraceError(f"{path.name} has no requests")
    return sorted(requests, key=lambda request: request.at)


def _request(line: bytes, place: str, block_size: int) -> TraceRequest:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{place}: must be a JSON object")
    at, tokens, ids = row.get("timestamp"), row.get("input_length"), row.get("hash_ids")
    if not isinstance(at, int | float) or at < 0:
        raise TraceError(f"{place}: timestamp must be milliseconds from 0")
    if not isinstance(tokens, int) or tokens < 1:
        raise TraceError(f"{place}: input_length must be a number of tokens from 1")
    if not isinstance(ids, list) or not all(isinstance(one, int) and 0 <= one < 2**63 for one in ids):
        raise TraceError(f"{place}: hash_ids must be a list of integers from 0")
    if not tokens // block_size <= len(ids) <= -(-tokens // block_size):
        raise TraceError(
            f"{place}: hash_ids has {len(ids)} blocks for {tokens} tokens, which is not a block size of {block_size}; "
            "give the trace's own with --block-size"
        )
    return TraceRequest(at / 1000, tokens, tuple(ids[: tokens // block_size]))
