"""Snapshots in the object store ``kv_snapshots``: two slots, written in turns, so that a whole one always exists."""

import asyncio
import base64
import contextlib
import hashlib
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ObjectMeta, ObjectMetaOptions
from nats.js.errors import BadObjectMetaError, NotFoundError
from nats.js.object_store import ObjectStore

from schemas.subjects import SNAPSHOT_BUCKET
from services.router.snapshot_form import SnapshotRefusedError

SLOTS = ("router.0", "router.1")
CHUNK_BYTES = 512 * 1024
PIECES_AT_ONCE = 16
PIECE_SECONDS = 10.0
_STREAM = f"OBJ_{SNAPSHOT_BUCKET}"
_CHUNKS = f"$O.{SNAPSHOT_BUCKET}.C."
_PROTOCOL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A stored snapshot by what its name tag says: stream and position as in SnapshotHeader, size in bytes."""

    name: str
    stream: int
    position: int
    size: int
    chunks: str


class SnapshotStore:
    """Reads and writes snapshots. Raises nats.errors.Error when NATS cannot be reached."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js

    async def slots(self) -> list[Slot]:
        """What is stored, the newest first."""
        store = await self._store()
        found = []
        for name in SLOTS:
            try:
                info = await store.get_info(name)
            except (NotFoundError, BadObjectMetaError):
                continue
            stream, _, position = (info.description or "").partition(":")
            numbers = (int(stream), int(position)) if stream.isdecimal() and position.isdecimal() else (0, 0)
            found.append(Slot(name, *numbers, info.size or 0, info.nuid or ""))
        return sorted(found, key=lambda slot: (slot.stream, slot.position), reverse=True)

    async def load(self, slot: Slot, timeout: float) -> bytes:
        """The body of a snapshot. Raises SnapshotRefusedError when it is not whole."""
        try:
            info = await (await self._store()).get_info(slot.name)
            async with asyncio.timeout(timeout):
                pieces = await self._pieces(info.nuid or "", info.chunks or 0)
        except (NotFoundError, BadObjectMetaError):
            raise SnapshotRefusedError("damaged", "it is gone or its description cannot be read") from None
        except TimeoutError:
            raise SnapshotRefusedError("damaged", f"it was not whole after {timeout:.0f} s") from None
        body = b"".join(pieces)
        digest = await asyncio.to_thread(hashlib.sha256, body)
        if info.digest != f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}":
            raise SnapshotRefusedError("damaged", "its digest is wrong")
        return body

    async def _pieces(self, chunks: str, number: int) -> list[bytes]:
        """The pieces of an object, in order. Raises TimeoutError when one does not come.

        Not ObjectStore.get: its push consumer spends most of the time waiting for flow control (2 s for 100 MB, a pull
        takes 0.3 s), and it waits for ever where pieces are missing.
        """
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=PIECE_SECONDS * 2)
        subscription = await self._js.pull_subscribe(f"{_CHUNKS}{chunks}", stream=_STREAM, config=config)
        try:
            pieces: list[bytes] = []
            while len(pieces) < number:
                wanted = min(PIECES_AT_ONCE, number - len(pieces))
                pieces += [message.data for message in await subscription.fetch(wanted, timeout=PIECE_SECONDS)]
            return pieces
        finally:
            with contextlib.suppress(NatsError, TimeoutError):
                await subscription.unsubscribe()

    async def save(self, stream: int, position: int, body: bytes) -> None:
        """Write over the older slot; pieces that nothing refers to any more go first."""
        store, slots = await self._store(), await self.slots()
        await self._purge_orphans({slot.chunks for slot in slots})
        taken = slots[0].name if slots else ""
        name = next(slot for slot in SLOTS if slot != taken)
        size = min(CHUNK_BYTES, self._js._nc.max_payload - _PROTOCOL_BYTES)
        meta = ObjectMeta(name=name, description=f"{stream}:{position}", options=ObjectMetaOptions(max_chunk_size=size))
        await store.put(name, body, meta)

    async def _store(self) -> ObjectStore:
        return await self._js.object_store(SNAPSHOT_BUCKET)

    async def _purge_orphans(self, used: set[str]) -> None:
        """A writer that died in the middle leaves pieces without a description."""
        info = await self._js.stream_info(_STREAM, subjects_filter=f"{_CHUNKS}>")
        for subject in info.state.subjects or {}:
            if subject.removeprefix(_CHUNKS) not in used:
                with contextlib.suppress(NatsError, TimeoutError):
                    await self._js.purge_stream(_STREAM, subject=subject)
