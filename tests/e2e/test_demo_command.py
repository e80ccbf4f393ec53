"""The demo as a person runs it: its table, its curl lines, and that nothing stays behind."""

import asyncio
import io
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from rich.console import Console

from kvroute.demo.run import EXAMPLE_TOKENS, run_demo
from kvroute.demo.view import View
from kvroute.demo.workload import Shape
from tests.conftest import wait_for

ROOT = Path(__file__).parents[2]
ONCE_SECONDS = 60.0
STOP_SECONDS = 20.0
CHILDREN = 6
MARK = "KVROUTE_TEST_CACHE"
TINY = Shape(
    conversations=2,
    system_prompts=1,
    system_tokens=96,
    turns=(2, 2),
    question_tokens=(40, 60),
    think_seconds=(0.0, 0.0),
    start_window_seconds=0.0,
)


class Demo:
    """A ``kvroute demo`` in a process of its own; everything it starts carries a mark in its environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvroute", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {MARK: f"/tmp/{self.mark}"},
            start_new_session=True,
        )

    def until(self, words: str) -> None:
        """Read its output up to a line with these words."""
        assert self.process.stdout is not None
        while words not in self.process.stdout.readline():
            assert self.process.poll() is None

    def children(self) -> list[int]:
        """Process ids of its children."""
        folder = Path(f"/proc/{self.process.pid}/task")
        return [int(pid) for task in folder.iterdir() for pid in (task / "children").read_text().split()]

    def marked(self) -> list[str]:
        """Commands of running processes that carry its mark (Valkey overwrites its environment and does not)."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


def are_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    demos: list[Demo] = []
    yield demos
    for demo in demos:
        if demo.process.poll() is None:
            demo.process.send_signal(signal.SIGTERM)
            demo.process.communicate(timeout=STOP_SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_once_ends_by_itself_with_cache_aware_ahead_in_every_figure_and_leaves_nothing(demos: list[Demo]) -> None:
    demos.append(demo := Demo("--once"))
    began = time.monotonic()
    demo.until("round robin: ")
    children = demo.children()
    output, _ = demo.process.communicate(timeout=ONCE_SECONDS + 20)
    assert time.monotonic() - began < ONCE_SECONDS
    assert demo.process.returncode == 0, output
    for words in ("hit ratio", "prefilled tokens", "time to first token, mean", "time to first token, p99"):
        assert words in output
    assert "\x1b" not in output
    assert len(children) == CHILDREN
    assert are_gone(children)
    assert demo.marked() == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("when", ["starting NATS", "round robin: "])
def test_ctrl_c_stops_everything_whenever_it_comes(demos: list[Demo], when: str) -> None:
    demos.append(demo := Demo())
    demo.until(when)
    children = demo.children()
    demo.process.send_signal(signal.SIGINT)
    output, _ = demo.process.communicate(timeout=STOP_SECONDS)
    assert demo.process.returncode == 0, output
    assert "Traceback" not in output
    wait_for(lambda: are_gone(children) and demo.marked() == [], "empty process list", 5)


@pytest.fixture
async def serving() -> AsyncIterator[list[str]]:
    """The curl lines of a demo that keeps serving."""
    console = Console(file=io.StringIO(), record=True, soft_wrap=True, highlight=False, force_terminal=False)
    running = asyncio.create_task(run_demo(View(console), once=False, shape=TINY))
    give_up = time.monotonic() + ONCE_SECONDS
    while "serving until Ctrl-C" not in console.export_text(clear=False):
        assert not running.done(), running.result()
        assert time.monotonic() < give_up, console.export_text(clear=False)
        await asyncio.sleep(0.1)
    yield [line for line in console.export_text(clear=False).splitlines() if line.startswith("curl ")]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_three_curl_lines_work_as_printed(serving: list[str]) -> None:
    answers = [await asyncio.to_thread(_run_curl, line) for line in serving]
    query, workers, completion = answers
    matched = max(instance["longest_matched"] for instance in query["default"].values())
    assert matched == len(EXAMPLE_TOKENS) // 32 * 32
    assert len(workers["workers"]) == 4
    assert completion["usage"]["completion_tokens"] == 16


def _run_curl(line: str) -> Any:
    """What a shell's curl would get: the test needs no curl where there is none."""
    words = shlex.split(line)
    url = next(word for word in words if word.startswith("http"))
    body = words[words.index("-d") + 1] if "-d" in words else None
    headers = {"content-type": "application/json"}
    response = httpx.request("POST" if body else "GET", url, content=body, headers=headers, trust_env=False)
    assert response.status_code == 200, response.text
    return orjson.loads(response.content)
