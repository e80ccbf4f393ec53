"""An index with snapshots, for tests that do not care how the index writes itself."""

import pickle

from services.router.index.plain import PlainIndex
from services.router.index.port import PrefixIndex


class _Pickled(PlainIndex):
    def snapshot(self) -> bytes:
        return pickle.dumps(self.__dict__)

    def restore(self, snapshot: bytes) -> None:
        try:
            self.__dict__.update(pickle.loads(snapshot))
        except Exception as error:
            raise ValueError(f"damaged: {error}") from error


def make_index() -> PrefixIndex:
    return PlainIndex() if hasattr(PlainIndex, "snapshot") else _Pickled()
