"""Log lines: one valid line each, UTC, never an exception into the caller."""

import asyncio
import io
import json
import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest
import structlog

from services.runtime.logging import RateLimited, configure_logging, get_logger, kv_event_wanted, log_kv_event
from services.runtime.settings import LoggingSettings


@pytest.fixture(autouse=True)
def _restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def configured(**settings: str) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("router", LoggingSettings(**settings), stream)  # type: ignore[arg-type]
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "America/New_York"])
def test_lg_01_times_are_utc_with_a_zone_mark_whatever_the_local_zone(
    zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    stream = configured(format="json")
    get_logger("test").info("hello")
    monkeypatch.undo()
    time.tzset()
    (line,) = lines(stream)
    stamp = str(line["timestamp"])
    assert stamp.endswith("Z")
    assert stamp.startswith(time.strftime("%Y-%m-%dT%H:", time.gmtime()))


@pytest.mark.parametrize(
    "value",
    [
        {18446744073709551615: 1},
        b"\xff",
        {1, 2},
        float("nan"),
        "\ud800",
        2**70,
        object(),
        [[[[[[[[1]]]]]]]],
        "x" * 9999,
    ],
)
@pytest.mark.parametrize("form", ["json", "console"])
def test_lg_02_anything_can_be_logged_as_one_line(value: object, form: str) -> None:
    stream = configured(format=form)
    get_logger("test").info("odd", value=value, **{"\udfff": 1})
    text = stream.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert "b'" not in text
    if form == "json":
        assert lines(stream)[0]["event"] == "odd"


async def test_lg_03_context_stays_with_its_task() -> None:
    stream = configured(format="json")

    async def handle(number: int) -> None:
        with structlog.contextvars.bound_contextvars(request_id=number):
            await asyncio.sleep(0)
            await asyncio.to_thread(get_logger("test").info, "work", number=number)

    await asyncio.gather(*(handle(number) for number in range(200)))
    get_logger("test").info("after")
    *work, after = lines(stream)
    assert len(work) == 200
    assert all(line["request_id"] == line["number"] for line in work)
    assert "request_id" not in after
    assert after["service"] == "router"


def test_lg_04_the_console_form_works_without_a_terminal() -> None:
    stream = configured(format="console")
    get_logger("test").info("hello", bytes=b"abc")
    assert "hello" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


def test_a_broken_output_does_not_raise() -> None:
    stream = configured(format="json")
    stream.close()
    get_logger("test").info("hello")
    with pytest.raises(ValueError, match="closed"):
        stream.getvalue()


def test_library_records_become_lines_of_ours() -> None:
    stream = configured(format="json")
    logging.getLogger("some.library").warning("careful %s", "now")
    (line,) = lines(stream)
    assert (line["library"], line["message"], line["level"]) == ("some.library", "careful now", "warning")


def test_matched_confirmed_and_expired_are_written_at_info_and_the_rest_is_not() -> None:
    stream = configured(format="json")
    logger = get_logger("test")
    for state in ("received", "queued", "matched", "confirmed", "applied", "pending_expired"):
        log_kv_event(logger, state, medium="CPU")
        assert kv_event_wanted(state) == (state in {"matched", "confirmed", "pending_expired"})
    assert [line["state"] for line in lines(stream)] == ["matched", "confirmed", "pending_expired"]
    assert {(line["event"], line["medium"]) for line in lines(stream)} == {("kv_event", "cpu")}


@pytest.mark.parametrize(("level", "expected"), [("debug", 2), ("info", 1), ("off", 0)])
def test_kv_events_have_a_level_of_their_own(level: str, expected: int) -> None:
    stream = configured(format="json", kv_events=level)
    for state in ("queued", "matched"):
        log_kv_event(get_logger("test"), state)
    assert len(lines(stream)) == expected


def test_repeated_warnings_are_held_back_and_counted() -> None:
    limiter = RateLimited(interval=10)
    assert [limiter.allow("a", now) for now in (0, 1, 2, 11, 12)] == [0, None, None, 2, None]
    assert limiter.allow("b", 12) == 0


def test_the_time_stamp_has_no_local_offset() -> None:
    stream = configured(format="json")
    get_logger("test").info("x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", str(lines(stream)[0]["timestamp"]))


@pytest.mark.parametrize("form", ["json", "console"])
def test_users_and_passwords_in_urls_are_masked_wherever_they_stand(form: str) -> None:
    stream = configured(format=form)
    try:
        raise OSError("no way to redis://user:s3cret@host:6379/0")
    except OSError:
        get_logger("test").exception(
            "failed", where=["nats://me:s3cret@a:1,nats://me:s3cret@b:2"], s={"u": "tls://t0ken@h"}
        )
    assert "s3cret" not in stream.getvalue()
    assert "t0ken" not in stream.getvalue()
    assert "nats://***@a:1,nats://***@b:2" in stream.getvalue()


def test_a_long_text_keeps_its_end_where_a_trace_names_the_error() -> None:
    stream = configured(format="json")
    get_logger("test").info("long", exception="x" * 100_000 + "ValueError: this one")
    assert len(stream.getvalue()) < 5000
    assert str(lines(stream)[0]["exception"]).endswith("ValueError: this one")


async def test_lg_03_a_cancelled_request_leaves_nothing_behind_and_threads_name_the_service() -> None:
    stream = configured(format="json")

    async def handle() -> None:
        with structlog.contextvars.bound_contextvars(request_id=1):
            await asyncio.sleep(3600)

    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    thread = threading.Thread(target=get_logger("test").info, args=("from a thread",))
    thread.start()
    thread.join()
    (line,) = lines(stream)
    assert "request_id" not in line
    assert line["service"] == "router"
