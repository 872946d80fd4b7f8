"""Slots on disk that a thief of the disk cannot read: AES-256-GCM around `SlotFiles`.

A slot becomes nonce, ciphertext and tag, one page longer than before. The nonce is random and new
with each write (safe for 2^32 writes of one key: exabytes). The tag covers the slot's number, so
that ciphertexts cannot change places; an older one of the same slot fails `slot.verify` as another
block. Not hidden: how many blocks there are, and the tables' hashes, which are keyed by the cluster
secret and tell nothing of the tokens. A key lies in a file and appears in no message.
"""

import errno
import hashlib
import mmap
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from prefixfleet.store.block_files import BlockFiles
from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.bucket_shape import shape_of
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.kept_files import KeptFile
from prefixfleet.store.slot import SlotLayout
from prefixfleet.store.slot_files import BUCKET_BYTES, SlotFiles

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


def read_key(path: Path) -> bytes:
    """The key in the file at ``path``: 64 hex digits, or 32 raw bytes.

    Raises:
        ConfigError: it cannot be read or is none; says where, never what.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"disk key, {path}: {error.strerror or error}") from error
    if len(raw) == KEY_BYTES:
        return raw
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"disk key, {path}: got {len(raw)} bytes, expected {2 * KEY_BYTES} hex digits; "
            "make one with: openssl rand -hex 32"
        )
    return key


def open_slot_files(
    folder: Path,
    layout: SlotLayout,
    namespace: bytes,
    room_bytes: int,
    key: bytes | None,
    found: Sequence[KeptFile] = (),
) -> BlockFiles:
    """Files for the disk tier, as many as fit into ``room_bytes`` whole, encrypted if there is a
    ``key``; by `shape_of` those that were ``found`` in ``folder``. Does no I/O."""
    slot_bytes = (_around(layout) if key else layout).slot_bytes
    shape = shape_of(slot_bytes, room_bytes, found)
    slots, size = shape.slots * shape.files, shape.slots * slot_bytes
    if key is None:
        return SlotFiles(folder, layout, namespace, slots, size)
    return EncryptedSlotFiles(folder, layout, namespace, slots, key, size)


class EncryptedSlotFiles:
    """`SlotFiles` with the same promises and the same owner. Files of another key, and plain ones,
    are deleted when they are recovered, as those of another namespace are."""

    def __init__(
        self,
        folder: Path,
        layout: SlotLayout,
        namespace: bytes,
        num_slots: int,
        key: bytes,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        mark = hashlib.blake2b(namespace, key=key, digest_size=16, person=b"pf-disk-mark").digest()
        derived = hashlib.blake2b(
            namespace, key=key, digest_size=32, person=b"pf-disk-key"
        ).digest()
        self._cipher = AESGCM(derived)
        self._size = NONCE_BYTES + layout.slot_bytes + TAG_BYTES
        self._files = SlotFiles(folder, _around(layout), mark, num_slots, bucket_bytes)

    @property
    def bucket_slots(self) -> int:
        """See `SlotFiles`."""
        return self._files.bucket_slots

    @property
    def bucket_bytes(self) -> int:
        """See `SlotFiles`."""
        return self._files.bucket_bytes

    @property
    def buckets(self) -> list[int]:
        """See `SlotFiles`."""
        return self._files.buckets

    @property
    def direct(self) -> bool:
        """See `SlotFiles`."""
        return self._files.direct

    def recover(self) -> list[DiskBlock]:
        """See `SlotFiles`."""
        return self._files.recover()

    def write(self, blocks: Sequence[tuple[DiskBlock, memoryview]]) -> None:
        """See `SlotFiles`. Takes as much memory again as ``blocks`` while it writes."""
        self._files.write([(block, self._encrypted(block.slot, data)) for block, data in blocks])

    def read(self, slot: int, target: memoryview) -> None:
        """See `SlotFiles`. Raises `CorruptBlock` too: changed, or not written with this key."""
        if target.nbytes != self.layout.slot_bytes:
            raise OSError(errno.EINVAL, f"{target.nbytes} bytes for a slot")
        page = self._buffer()
        self._files.read(slot, page)
        nonce, data = page[:NONCE_BYTES], page[NONCE_BYTES : self._size]
        try:
            target[:] = self._cipher.decrypt(nonce, data, _place(slot))
        except InvalidTag:
            raise CorruptBlock(f"disk slot {slot}: it was changed since it was written") from None

    def forget(self, slots: Iterable[int]) -> None:
        """See `SlotFiles`."""
        self._files.forget(slots)

    def delete(self, number: int) -> None:
        """See `SlotFiles`."""
        self._files.delete(number)

    def close(self) -> None:
        """See `SlotFiles`."""
        self._files.close()

    def _encrypted(self, slot: int, data: memoryview) -> memoryview:
        page = self._buffer()
        nonce = secrets.token_bytes(NONCE_BYTES)
        page[:NONCE_BYTES] = nonce
        page[NONCE_BYTES : self._size] = self._cipher.encrypt(nonce, data, _place(slot))
        return page

    def _buffer(self) -> memoryview:
        """Page-aligned memory for direct I/O."""
        return memoryview(mmap.mmap(-1, self._files.layout.slot_bytes))


def _around(layout: SlotLayout) -> SlotLayout:
    """What a slot of ``layout`` is on the disk."""
    return SlotLayout(payload_bytes=NONCE_BYTES + layout.slot_bytes + TAG_BYTES)


def _place(slot: int) -> bytes:
    return b"slot" + slot.to_bytes(8, "little")
