"""The block hashes of schemas/blocks.py in C; `hashing` is None where they were not compiled."""

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.native import _hashing as hashing
else:
    hashing: ModuleType | None
    try:
        from schemas.native import _hashing as hashing
    except ImportError:
        hashing = None

HASHING_IS_COMPILED = hashing is not None
