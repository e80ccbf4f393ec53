"""Coverage-guided fuzzing of every codec: ``python tests/fuzz/wire_target.py CORPUS [libFuzzer options]``.

Anything but WireError out of a codec is a crash; the peak of memory is limited by ``-rss_limit_mb``.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["schemas.wire"]):
    from schemas.wire import memcache, mooncake, vllm, yuanrong
    from schemas.wire.frames import parse_live, parse_replay
    from schemas.wire.types import WireError

PARTS = (vllm.decode, memcache.decode, mooncake.decode, yuanrong.decode, parse_live, parse_replay)


def one_input(data: bytes) -> None:
    """Every part reads the input; frames are cut at the bytes ``fe fe``."""
    groups = vllm.GroupFilter()
    for part in PARTS:
        try:
            if part in (parse_live, parse_replay):
                part(data.split(b"\xfe\xfe"))
            elif part is vllm.decode:
                groups.apply(vllm.decode(data))
            else:
                part(data)
        except WireError:
            continue


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
