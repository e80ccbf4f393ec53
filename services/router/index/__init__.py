"""The prefix index: one behaviour, a plain implementation and (where it was compiled) a native one."""

from typing import Literal

from services.router.index.plain import PlainIndex
from services.router.index.port import PrefixIndex

Choice = Literal["auto", "native", "plain"]


def native_available() -> bool:
    """Whether the compiled core was built into this installation."""
    try:
        from services.router.index import native  # noqa: F401
    except ImportError:
        return False
    return True


def create_index(choice: Choice, max_blocks: int, max_waiting_blocks: int) -> PrefixIndex:
    """A new, empty index. auto: the compiled core where it is present. Raises RuntimeError for a missing native one."""
    if choice == "native" or (choice == "auto" and native_available()):
        try:
            from services.router.index.native import NativeIndex
        except ImportError as error:
            raise RuntimeError(f"router.index is native, but the compiled core is missing: {error}") from None
        return NativeIndex(max_blocks=max_blocks, max_waiting_blocks=max_waiting_blocks)
    return PlainIndex(max_blocks=max_blocks, max_waiting_blocks=max_waiting_blocks)
