"""A slot: the fixed-size home of one block in a pool, on the wire and on disk, self-describing.

A slot holds one shard a tensor-parallel rank, each with its own header, so that ranks write
without waiting for each other and a reader can prove every byte it got. Layout of one shard:
64 bytes of header, then the payload, padded to `ALIGN_BYTES`.
"""

import struct
from dataclasses import dataclass, field

import xxhash

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.errors import ConfigError, CorruptBlock
from prefixfleet.store.namespace import DIGEST_BYTES

ALIGN_BYTES = 4096  # a page, and the unit of direct disk I/O
_HEADER = struct.Struct("<8s16s16sQQHH4x")  # magic, namespace, hash, length, checksum, shard, of
_MAGIC = b"pfslot\x00\x01"
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Size of a slot. Nodes exchange blocks only if their slot layouts are equal.

    ``shard_bytes`` lie between one shard's header and the next, ``slot_bytes`` between one slot and
    the next; both are multiples of `ALIGN_BYTES`.

    Raises:
        ConfigError: a number is below 1.
    """

    payload_bytes: int  # of one shard
    shards: int = 1
    shard_bytes: int = field(init=False, repr=False, compare=False)
    slot_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.payload_bytes < 1 or not 1 <= self.shards < 1 << 16:
            raise ConfigError(f"slot layout: got {self}, expected at least 1 byte and 1 shard")
        pages = -(-(HEADER_BYTES + self.payload_bytes) // ALIGN_BYTES)
        object.__setattr__(self, "shard_bytes", pages * ALIGN_BYTES)
        object.__setattr__(self, "slot_bytes", pages * ALIGN_BYTES * self.shards)

    def payload(self, slot: memoryview, shard: int = 0) -> memoryview:
        """The payload of one shard inside a slot's memory."""
        start = shard * self.shard_bytes + HEADER_BYTES
        return slot[start : start + self.payload_bytes]


def seal(
    slot: memoryview, layout: SlotLayout, namespace: bytes, block: BlockHash, shard: int = 0
) -> None:
    """Write the header of a shard whose payload is complete; the checksum covers the payload.

    Raises `CorruptBlock` for a name of another length than a header holds.
    """
    checksum = xxhash.xxh3_64_intdigest(layout.payload(slot, shard))
    start = shard * layout.shard_bytes
    slot[start : start + HEADER_BYTES] = _header(layout, namespace, block, shard, checksum)


def verify(
    slot: memoryview, layout: SlotLayout, namespace: bytes, block: BlockHash, shard: int = 0
) -> None:
    """Prove that a shard is what the caller asked for, to the last byte.

    Raises:
        CorruptBlock: magic, namespace, hash, length, shard, padding or checksum differ.
    """
    ShardProof(slot, layout, namespace, block, shard).finish()


class ShardProof:
    """Proves one shard whose payload arrives little by little, while it is in the cache.

    Owned by who receives it; one thread at a time. The interpreter's lock is free while it hashes.
    """

    def __init__(
        self,
        slot: memoryview,
        layout: SlotLayout,
        namespace: bytes,
        block: BlockHash,
        shard: int = 0,
    ) -> None:
        start = shard * layout.shard_bytes
        self._header = slot[start : start + HEADER_BYTES]
        self._payload = layout.payload(slot, shard)
        self._wanted = (layout, namespace, block, shard)
        self._hasher = xxhash.xxh3_64()
        self._hashed = 0

    def arrived(self, count: int) -> None:
        """The first ``count`` bytes of the shard, header included, are in place for good."""
        end = min(count - HEADER_BYTES, self._payload.nbytes)
        if end > self._hashed:
            self._hasher.update(self._payload[self._hashed : end])
            self._hashed = end

    def finish(self) -> None:
        """The whole shard is in place. Raises `CorruptBlock`, as `verify` does."""
        self.arrived(HEADER_BYTES + self._payload.nbytes)
        _prove(bytes(self._header), _header(*self._wanted, self._hasher.intdigest()))


def copy_out(
    slot: memoryview,
    layout: SlotLayout,
    namespace: bytes,
    block: BlockHash,
    shard: int,
    target: memoryview,
) -> None:
    """Copy a shard's payload into ``target``, then prove the copy.

    A slot that is written meanwhile, because its pin was lost, can spoil the copy but not pass.

    Raises:
        CorruptBlock: as `verify`.
    """
    start = shard * layout.shard_bytes
    header = bytes(slot[start : start + HEADER_BYTES])
    target[:] = layout.payload(slot, shard)
    checksum = xxhash.xxh3_64_intdigest(target)
    _prove(header, _header(layout, namespace, block, shard, checksum))


def _header(
    layout: SlotLayout, namespace: bytes, block: BlockHash, shard: int, checksum: int
) -> bytes:
    if not len(namespace) == len(block) == DIGEST_BYTES:  # packing would cut or fill them
        raise CorruptBlock(
            f"slot header: got a namespace of {len(namespace)} and a hash of {len(block)} bytes, "
            f"expected {DIGEST_BYTES} each"
        )
    return _HEADER.pack(
        _MAGIC, namespace, block, layout.payload_bytes, checksum, shard, layout.shards
    )


def _prove(header: bytes, expected: bytes) -> None:
    if header != expected:
        got, wanted = _HEADER.unpack(header), _HEADER.unpack(expected)
        raise CorruptBlock(f"slot header: got {got}, expected {wanted}")
