"""Captured bytes of real engines and pools, by name."""

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@cache
def _read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def engine_capture(name: str) -> Any:
    """A capture of a real vLLM engine, by file name without ending."""
    return _read(DATA / "captures" / "engine" / f"{name}.json")


def engine_capture_names() -> list[str]:
    """Every engine capture that has prompts with the engine's own cached tokens."""
    names = sorted(path.stem for path in (DATA / "captures" / "engine").glob("*.json"))
    return [name for name in names if isinstance(engine_capture(name), dict) and "prompts" in engine_capture(name)]


def pool_capture(name: str) -> Any:
    """A capture of a real pool service, by file name without ending."""
    return _read(DATA / "captures" / "pool" / f"{name}.json")


def publisher_capture(name: str) -> Any:
    """A capture of vLLM's own publisher module, by file name without ending."""
    return _read(DATA / "captures" / "publisher" / f"{name}.json")


def publisher_capture_names() -> list[str]:
    """Every release whose publisher module was captured."""
    return sorted(path.stem for path in (DATA / "captures" / "publisher").glob("vllm-*.json"))
