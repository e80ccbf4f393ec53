"""Bodies of requests and answers: JSON, msgpack, raw tokens; always the answer in the request's encoding."""

from typing import Any, Literal

import msgspec
import orjson

from services.runtime.bounded_bodies import TooComplexError, check_json, read_msgpack

Encoding = Literal["json", "msgpack"]
MEDIA_TYPES: dict[Encoding, str] = {"json": "application/json", "msgpack": "application/msgpack"}
RAW_MEDIA_TYPE = "application/octet-stream"

_msgpack_encoder = msgspec.msgpack.Encoder()


class BodyRefusedError(ValueError):
    """A body that cannot be used; the text names the field and the fix. status: HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def media_type(content_type: str | None) -> str:
    """The media type of a Content-Type, lower case and without parameters."""
    return (content_type or "").partition(";")[0].strip().lower()


def encoding_of(content_type: str | None) -> Encoding:
    """The encoding that a Content-Type asks for; anything but msgpack is JSON."""
    return "msgpack" if media_type(content_type) in ("application/msgpack", "application/x-msgpack") else "json"


def is_raw(content_type: str | None) -> bool:
    """Whether the body is tokens as raw little-endian u32, with the rest in the query string."""
    return media_type(content_type) == RAW_MEDIA_TYPE


def encode_body(value: object, encoding: Encoding) -> bytes:
    """An answer's body."""
    return _msgpack_encoder.encode(value) if encoding == "msgpack" else orjson.dumps(value)


def decode_body(body: bytes, encoding: Encoding, what: str) -> dict[str, Any]:
    """A request's body as a mapping. Raises BodyRefusedError."""
    try:
        if encoding == "msgpack":
            value = read_msgpack(body)
        else:
            check_json(body)
            value = orjson.loads(body)
    except TooComplexError as error:
        raise BodyRefusedError(f"invalid {what} request body: {error}", 413) from None
    except (orjson.JSONDecodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyRefusedError(f"invalid {what} request body: not {encoding}: {error}") from None
    if not isinstance(value, dict):
        raise BodyRefusedError(f"invalid {what} request body: must be an object of fields")
    return value
