"""A compact map from block fields to bitmaps of holders: some 25 bytes a block instead of 140.

Keys lie in open-addressed arrays of 64-bit integers, 1,024 of them so that none takes long to
grow. Few different sets of nodes hold blocks together, so each set is stored once and a block
has its number: that a node is gone from all its blocks is a change of the sets, not of the blocks.
"""

from array import array
from collections.abc import Iterable

SHARDS = 1_024
_SHARD_BITS = 10
_FIRST_SIZE = 8  # slots of a new shard; a power of two, like every later size
_FILL = 0.7  # of the slots of a shard, before it doubles
NOBODY = 0  # number of the empty set, and of a slot whose block nobody holds any more


class BlockTable:
    """Owned by one `View`. Fields are 8 bytes; bitmaps are integers of any size."""

    def __init__(self) -> None:
        self._keys = [array("Q", bytes(8 * _FIRST_SIZE)) for _ in range(SHARDS)]
        self._sets = [array("I", bytes(4 * _FIRST_SIZE)) for _ in range(SHARDS)]
        self._used = array("I", bytes(4 * SHARDS))  # slots with a key, held or not
        self._bitmaps: list[int] = [0]
        self._blocks: list[int] = [0]  # blocks of each set
        self._numbers: dict[int, int] = {0: NOBODY}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return sum(
            count for bitmap, count in zip(self._bitmaps, self._blocks, strict=True) if bitmap
        )

    def __getitem__(self, field: bytes) -> int:
        """Bitmap of the holders of a block; 0 if nobody is known to hold it."""
        key = int.from_bytes(field) or 1  # 0 marks a free slot; nobody will miss one in 2^64
        shard = key & (SHARDS - 1)
        keys = self._keys[shard]
        mask = len(keys) - 1
        slot = (key >> _SHARD_BITS) & mask
        while stored := keys[slot]:
            if stored == key:
                return self._bitmaps[self._sets[shard][slot]]
            slot = (slot + 1) & mask
        return 0

    def add(self, fields: Iterable[bytes], bit: int) -> None:
        """Set ``bit`` for these blocks."""
        self._change(fields, bit, 0)

    def remove(self, fields: Iterable[bytes], bit: int) -> None:
        """Clear ``bit`` for these blocks."""
        self._change(fields, 0, bit)

    def drop(self, bit: int) -> None:
        """Clear ``bit`` everywhere."""
        self._numbers = {}
        for number, bitmap in enumerate(self._bitmaps):
            left = bitmap & ~bit
            self._bitmaps[number] = left
            self._numbers.setdefault(left, number)
        self._numbers[0] = NOBODY

    def _change(self, fields: Iterable[bytes], more: int, less: int) -> None:
        all_keys, all_sets, bitmaps, blocks = self._keys, self._sets, self._bitmaps, self._blocks
        from_bytes = int.from_bytes
        last_before, last_number = -1, NOBODY  # neighbours in a chain have the same holders
        for field in fields:
            key = from_bytes(field) or 1
            shard = key & (SHARDS - 1)
            keys = all_keys[shard]
            mask = len(keys) - 1
            slot = (key >> _SHARD_BITS) & mask
            while (stored := keys[slot]) and stored != key:
                slot = (slot + 1) & mask
            sets = all_sets[shard]
            before = sets[slot]
            if before != last_before:
                bitmap = bitmaps[before]
                after = (bitmap | more) & ~less
                last_before = before
                last_number = before if after == bitmap else self._number(after)
            if last_number == before:
                continue
            sets[slot] = last_number
            blocks[last_number] += 1
            if stored:
                if self._leave(before):
                    last_before = -1
            else:
                keys[slot] = key
                self._used[shard] += 1
                if self._used[shard] > _FILL * len(keys):
                    self._resize(shard)
                    last_before = -1

    def _number(self, bitmap: int) -> int:
        """Number of a set, a new one if it has none."""
        number = self._numbers.get(bitmap)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._bitmaps[number] = bitmap
            else:
                number = len(self._bitmaps)
                self._bitmaps.append(bitmap)
                self._blocks.append(0)
            self._numbers[bitmap] = number
        return number

    def _leave(self, number: int) -> bool:
        """One block less in a set. True if it was the last: the set gives its number back."""
        self._blocks[number] -= 1
        if self._blocks[number] or number == NOBODY:
            return False
        bitmap = self._bitmaps[number]
        if self._numbers.get(bitmap) == number:
            del self._numbers[bitmap]
        self._bitmaps[number] = 0
        self._free.append(number)
        return True

    def _resize(self, shard: int) -> None:
        """Make room, after forgetting the blocks that nobody holds."""
        old_keys, old_sets = self._keys[shard], self._sets[shard]
        held = []
        for key, number in zip(old_keys, old_sets, strict=True):
            if self._bitmaps[number]:
                held.append((key, number))
            elif key:
                self._leave(number)
        size = _FIRST_SIZE
        while len(held) > _FILL * size / 2:
            size *= 2
        keys, sets = array("Q", bytes(8 * size)), array("I", bytes(4 * size))
        for key, number in held:
            slot = (key >> _SHARD_BITS) & (size - 1)
            while keys[slot]:
                slot = (slot + 1) & (size - 1)
            keys[slot], sets[slot] = key, number
        self._keys[shard], self._sets[shard] = keys, sets
        self._used[shard] = len(held)
