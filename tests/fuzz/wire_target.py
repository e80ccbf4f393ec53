"""Coverage-guided fuzzing of every codec: ``python tests/fuzz/wire_target.py CORPUS [libFuzzer options]``.

Anything but WireError out of a codec is a crash; the peak of memory is limited by ``-rss_limit_mb``.
"""

import contextlib
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["schemas.wire"]):
    from schemas.wire import memcache, mooncake, vllm, yuanrong
    from schemas.wire.frames import parse_live, parse_replay
    from schemas.wire.types import WireError

GROUPS = vllm.GroupFilter()


def one_input(data: bytes) -> None:
    """Every codec reads the input; the frame parsers get it cut at the bytes ``fe fe``."""
    for decode in (vllm.decode, memcache.decode, mooncake.decode, yuanrong.decode):
        with contextlib.suppress(WireError):
            GROUPS.apply(decode(data))
    frames = data.split(b"\xfe\xfe")
    with contextlib.suppress(WireError):
        parse_live(frames)
    with contextlib.suppress(WireError):
        parse_replay(frames)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
