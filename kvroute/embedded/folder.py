"""The folder where the embedded servers keep their files: temporary, or one that outlives the stack."""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


class FolderError(RuntimeError):
    """A data folder that cannot be used; the text says why."""


@contextlib.contextmanager
def data_folder(wanted: Path | None) -> Iterator[Path]:
    """A folder with one user at a time; removed at the end when none was wanted. Raises FolderError."""
    if wanted is None:
        temporary = Path(tempfile.mkdtemp(prefix="kvroute-"))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        lock = (wanted / "lock").open("a")
    except OSError as error:
        raise FolderError(f"data folder {wanted} cannot be used: {error.strerror or error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FolderError(f"data folder {wanted} is in use by another kvroute; give it one of its own") from None
        yield wanted
