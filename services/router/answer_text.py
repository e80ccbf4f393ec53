"""The JSON text of /query's answer from parts that are made once per view of the registry and of the streams.

The same as answers.query_answer in JSON; most engines of a query have nothing, and theirs is ready text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from schemas.registry import EngineRecord
from services.router.answers import query_answer
from services.router.index.port import NOTHING, Coverage
from services.router.standing import Standings

_COUNTS = (
    b'{"matched_tokens":%d,"npu_blocks":%d,"cpu_blocks":%d,"disk_blocks":%d,"cpu_local_blocks":%d,'
    b'"cpu_remote_blocks":%d,"disk_local_blocks":%d,"disk_remote_blocks":%d}'
)

_NO_NUMBERS = (0,) * 8


@dataclass(frozen=True, slots=True)
class _Instance:
    """One instance. places: of its ranks among the engines. form: text with room for numbers; empty: without any."""

    places: tuple[int, ...]
    form: bytes
    empty: bytes


class AnswerText:
    """The answers of one space."""

    def __init__(self) -> None:
        self._engines: Sequence[EngineRecord] | None = None
        self._version = -1
        self._instances: list[_Instance] = []

    def render(
        self,
        tenant: str,
        engines: Sequence[EngineRecord],
        coverages: Sequence[Coverage],
        block_size: int,
        standings: Standings,
    ) -> bytes:
        """The text, for coverages of these engines in their order."""
        if engines is not self._engines or standings.version != self._version:
            self._instances = _instances(engines, standings)
            self._engines, self._version = engines, standings.version
        texts = []
        for instance in self._instances:
            longest = 0
            numbers: tuple[int, ...] = ()
            for place in instance.places:
                coverage = coverages[place]
                if coverage is NOTHING:
                    numbers += _NO_NUMBERS
                    continue
                npu, cpu_local, cpu_remote, disk_local, disk_remote = coverage
                cpu, disk = cpu_local + cpu_remote, disk_local + disk_remote
                tokens = (npu + cpu + disk) * block_size
                longest = max(longest, tokens)
                numbers += (tokens, npu, cpu, disk, cpu_local, cpu_remote, disk_local, disk_remote)
            texts.append(instance.form % (longest, *numbers) if longest else instance.empty)
        return b"{%b:{%b}}" % (orjson.dumps(tenant), b",".join(texts))


def _instances(engines: Sequence[EngineRecord], standings: Standings) -> list[_Instance]:
    places: dict[str, list[int]] = {}
    for place, engine in enumerate(engines):
        places.setdefault(engine.instance_id, []).append(place)
    whole = query_answer("", engines, [NOTHING] * len(engines), 1, standings)[""]
    instances = []
    for instance_id, own in places.items():
        name, streams = _form(instance_id), _form(whole[instance_id]["streams"])
        counts = b",".join(_form(str(engines[place].dp_rank)) + b":" + _COUNTS for place in own)
        form = b'%b:{"longest_matched":%%d,"DP":{%b},"streams":%b}' % (name, counts, streams)
        empty = orjson.dumps(instance_id) + b":" + orjson.dumps(whole[instance_id])
        instances.append(_Instance(tuple(own), form, empty))
    return instances


def _form(value: object) -> bytes:
    """JSON in which % stands for itself after formatting."""
    return orjson.dumps(value).replace(b"%", b"%%")
