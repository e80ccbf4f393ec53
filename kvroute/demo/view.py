"""What the demo shows while it runs: a live page on a terminal, plain progress lines elsewhere."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvroute.demo.cluster import Holdings
from kvroute.demo.placement import Worker
from kvroute.demo.results import Served

RECENT = 12
PLAIN_LINE_EVERY_SECONDS = 2.0


class View:
    """Tell it what happens (``phase``, ``note``, ``sent``, ``served``, ``holdings``); it draws. A context manager."""

    def __init__(self, console: Console, workers: Sequence[Worker] = ()) -> None:
        self.console = console
        self._workers = list(workers)
        self._phase = "starting"
        self._total = 0
        self._running: Counter[Worker] = Counter()
        self._holdings = Holdings({}, 0, 0)
        self._served: list[Served] = []
        self._recent: deque[Served] = deque(maxlen=RECENT)
        self._last_line = 0.0
        self._live = Live(console=console, refresh_per_second=5, get_renderable=self._render, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False)

    def phase(self, name: str, workers: Sequence[Worker], total_requests: int) -> None:
        """A load begins."""
        self._phase, self._workers, self._total = name, list(workers), total_requests
        self._served, self._running = [], Counter()
        self._recent.clear()
        if not self.console.is_terminal:
            self.note(f"{name}: {total_requests} requests to {len(self._workers)} DP ranks")

    def sent(self, worker: Worker) -> None:
        """A request was placed."""
        self._running[worker] += 1

    def served(self, request: Served) -> None:
        """A request's first token came."""
        self._running[request.worker] -= 1
        self._served.append(request)
        self._recent.appendleft(request)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._last_line >= PLAIN_LINE_EVERY_SECONDS:
            self._last_line = now
            self.note("  " + self._progress())

    def holdings(self, holdings: Holdings) -> None:
        """What lies where right now."""
        self._holdings = holdings

    def _progress(self) -> str:
        served = self._served
        tokens = sum(request.prompt_tokens for request in served) or 1
        cached = sum(request.cached_tokens for request in served)
        return (
            f"{self._phase}: {len(served)}/{self._total} served, hit ratio {cached / tokens:.0%}, blocks hit "
            f"npu {sum(r.npu_blocks for r in served)} / cpu {sum(r.cpu_blocks for r in served)} / "
            f"disk {sum(r.disk_blocks for r in served)}"
        )

    def _render(self) -> Group:
        workers = Table(expand=True)
        for heading in (
            "worker",
            "requests",
            "in flight",
            "hit ratio",
            "npu hits",
            "cpu hits",
            "disk hits",
            "npu blocks held",
        ):
            workers.add_column(heading, justify="left" if heading == "worker" else "right")
        for worker in self._workers:
            mine = [request for request in self._served if request.worker == worker]
            tokens = sum(request.prompt_tokens for request in mine) or 1
            workers.add_row(
                f"{worker.instance_id} dp{worker.dp_rank}",
                str(len(mine)),
                str(self._running[worker]),
                f"{sum(request.cached_tokens for request in mine) / tokens:.0%}",
                str(sum(request.npu_blocks for request in mine)),
                str(sum(request.cpu_blocks for request in mine)),
                str(sum(request.disk_blocks for request in mine)),
                str(self._holdings.npu.get(worker, 0)),
            )
        pool = Text(f"memcache pool holds {self._holdings.pool_cpu} blocks in cpu, {self._holdings.pool_disk} on disk")
        placements = Text("\n".join(map(_placement_line, self._recent)))
        return Group(
            Panel(Group(workers, pool), title=self._progress() if self._total else self._phase),
            Panel(placements, title="latest placements", height=RECENT + 2),
        )


def _placement_line(request: Served) -> str:
    promised = "" if request.promised_tokens is None else f"  router said {request.promised_tokens}"
    return (
        f"conversation {request.conversation:>3} turn {request.turn + 1} → {request.worker.instance_id} "
        f"dp{request.worker.dp_rank}  npu {request.npu_blocks:>3}  cpu {request.cpu_blocks:>3}  disk "
        f"{request.disk_blocks:>3}  cached {request.cached_tokens:>5} of {request.prompt_tokens:>5} tokens{promised}  "
        f"{request.seconds * 1000:>6.0f} ms"
    )
