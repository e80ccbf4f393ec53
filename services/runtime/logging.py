"""structlog for all services: JSON on a pipe, coloured on a terminal, UTC with a Z; a log call never raises."""

import logging
import math
import re
import sys
import time
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from services.runtime.settings import LoggingSettings

KV_EVENT = "kv_event"
INFO_STATES = frozenset({"matched", "confirmed", "pending_expired"})
MAX_TEXT = 4000
MAX_DEPTH = 6

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "off": 100}
_kv_event_level = _LEVELS["info"]
_level = _LEVELS["info"]


_USER_IN_URL = re.compile(r"(?<=://)[^/?#\s]*@")


def masked(text: str) -> str:
    """The text with user and password of every URL in it replaced by ``***``."""
    return _USER_IN_URL.sub("***@", text) if "://" in text and "@" in text else text


def plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON can carry: keys become text, bytes hex, NaN text, lone surrogates escapes.

    Long text is cut, users and passwords in URLs are masked.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        # The end is kept as well: in a traceback it says what went wrong.
        text = value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT // 2]} … {value[-MAX_TEXT // 2 :]}"
        return masked(text).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[:64]).hex()
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {str(plain(key, depth + 1)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    try:
        return plain(str(value), depth + 1)
    except Exception:
        return f"<{type(value).__name__}>"


def _make_plain(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return {str(plain(key)): plain(value) for key, value in event.items()}


def _json(logger: WrappedLogger, name: str, event: EventDict) -> str:
    return orjson.dumps(event).decode()


class _Output:
    """Writes whole lines; a closed or broken stream is no reason for a service to fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _write(self, message: Any) -> None:
        text = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = warn = error = critical = exception = fatal = log = msg = _write


def configure_logging(service: str, settings: LoggingSettings, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging of this process. Safe to call again."""
    global _kv_event_level, _level
    target = stream or sys.stderr
    _level = _LEVELS[settings.level]
    _kv_event_level = _LEVELS[settings.kv_events]
    on_terminal = target.isatty() if hasattr(target, "isatty") else False
    console = settings.format == "console" or (settings.format == "auto" and on_terminal)
    renderer: Any = structlog.dev.ConsoleRenderer(colors=on_terminal) if console else _json

    def add_service(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _make_plain,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.level]),
        logger_factory=lambda *arguments: _Output(target),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    handler = _ToStructlog()
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for noisy in ("nats", "faststream", "uvicorn", "uvicorn.error", "uvicorn.access", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
        logging.getLogger(noisy).handlers.clear()
        logging.getLogger(noisy).propagate = True


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:
            message = str(record.msg)
        logger = structlog.get_logger(record.name)
        extra = {"exc_info": record.exc_info} if record.exc_info else {}
        logger.log(record.levelno, "library", library=record.name, message=message, **extra)


def debug_is_on() -> bool:
    """Whether debug lines are written; for what is worth asking before a line's figures are gathered."""
    return _level <= _LEVELS["debug"]


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry the component's name."""
    logger: FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def log_kv_event(logger: FilteringBoundLogger, state: str, **fields: Any) -> None:
    """One step of the state machine: INFO for matched, confirmed and pending_expired, DEBUG for the others.

    The level `logging.kv_events` raises or lowers which of them are written; media are written in lower case.
    """
    level = _LEVELS["info"] if state in INFO_STATES else _LEVELS["debug"]
    if level < _kv_event_level:
        return
    if "medium" in fields:
        fields["medium"] = str(fields["medium"]).lower()
    # With kv_events at debug the operator asked to see every state, whatever the general level is.
    logger.log(
        max(level, _LEVELS["info"]) if _kv_event_level == _LEVELS["debug"] else level, KV_EVENT, state=state, **fields
    )


def kv_event_wanted(state: str) -> bool:
    """Whether a line of this state would be written, so that callers need not build its fields."""
    return (_LEVELS["info"] if state in INFO_STATES else _LEVELS["debug"]) >= _kv_event_level


class RateLimited:
    """Lets a repeated warning through once per interval and key, and says how many were held back."""

    def __init__(self, interval: float = 10.0, max_keys: int = 10_000) -> None:
        self._interval = interval
        self._max_keys = max_keys
        self._seen: dict[object, tuple[float, int]] = {}

    def allow(self, key: object, now: float | None = None) -> int | None:
        """None: hold this one back. A number: log it, that many like it were held back since the last."""
        moment = time.monotonic() if now is None else now
        last, held_back = self._seen.get(key, (-math.inf, 0))
        if moment - last < self._interval:
            self._seen[key] = (last, held_back + 1)
            return None
        if key not in self._seen and len(self._seen) >= self._max_keys:
            self._seen.clear()
        self._seen[key] = (moment, 0)
        return held_back
