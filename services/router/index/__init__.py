"""The prefix index: one behaviour, a plain implementation and (where it was compiled) a native one."""

import importlib
from collections.abc import Callable
from typing import Literal

from services.router.index.plain import PlainIndex
from services.router.index.port import PrefixIndex

Choice = Literal["auto", "native", "plain"]
MakeIndex = Callable[..., PrefixIndex]


def native_index() -> MakeIndex | None:
    """The compiled core's class, None where it was not built into this installation."""
    try:
        make: MakeIndex = importlib.import_module("services.router.index.native").NativeIndex
    except ImportError:
        return None
    return make


def native_available() -> bool:
    """Whether the compiled core was built into this installation."""
    return native_index() is not None


def create_index(choice: Choice, max_blocks: int, max_waiting_blocks: int) -> PrefixIndex:
    """A new, empty index. auto: the compiled core where it is present. Raises RuntimeError for a missing native one."""
    native = native_index() if choice != "plain" else None
    if choice == "native" and native is None:
        raise RuntimeError("router.index is native, but the compiled core is not installed; set it to auto or plain")
    make: MakeIndex = native or PlainIndex
    return make(max_blocks=max_blocks, max_waiting_blocks=max_waiting_blocks)
