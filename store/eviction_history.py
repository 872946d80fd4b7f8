"""`UseHistory`: the last use of every block of late, also of blocks that are gone (ghosts).

A request's chain falls into *stretches*: neighbours that were last used together, so that all the
model looks at is equal for them. A block costs 8 bytes here: the stretch of its last use, in a
table that forgets the older of two when it is full. Every return of a stretch, from the pool or
from the dead, and every stretch that grows older without one is told to the model.
Must not know slots.
"""

import math
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from prefixfleet.store.chain import BlockHash
from prefixfleet.store.reuse import BUCKETS, EDGES_S, UNKNOWN, Features, ReuseModel, bucket

LEAST_ENTRIES = 1 << 18
ENTRIES_PER_BLOCK = 4
STRETCHES_PER_ENTRY = 1 / 4
HUB_HITS = 4
"""A block used so often before, and now followed by a new one, is a template: what branches off
starts a new conversation. Below that, the conversation goes on."""
MOST_SOURCES = 1024
SOURCE_WEIGHT = 8.0
MOST_NEW = 15
"""Powers of two by which new blocks of a request are told apart; blocks may be of 16 tokens."""
_NONE = -1
_ID_BITS = 40
_ID = (1 << _ID_BITS) - 1


class _Request(NamedTuple):
    goes_on: bool  # an earlier chain is extended or asked anew
    new: int  # blocks
    source: int


class UseHistory:
    """Owned by one order. ``num_blocks`` is the size of the pool it serves."""

    def __init__(self, num_blocks: int) -> None:
        entries = 1 << math.ceil(math.log2(max(LEAST_ENTRIES, ENTRIES_PER_BLOCK * num_blocks)))
        ring = round(entries * STRETCHES_PER_ENTRY)
        self.model = ReuseModel()
        self._table = array("Q", [0]) * entries  # 24 bits of the hash, 40 of the stretch
        self._mask = entries - 1
        self._ring = ring - 1
        self._newest = 0
        self._used_at = array("d", [0.0]) * ring  # by stretch, modulo the ring
        self._class = array("H", [0]) * ring
        self._size = array("I", [0]) * ring
        self._alive = array("I", [0]) * ring  # blocks not used again since
        self._hits = array("I", [0]) * ring
        self._source = array("H", [0]) * ring
        self._bucket = array("B", [0]) * ring
        self._hands = [1] * (BUCKETS - 1)  # by bucket: the youngest stretch that has not left it
        self._lru_hand = 1
        self._lru_blocks = 0
        self._sources: dict[int, int] = {}
        self._source_returned = array("d", [0.0])
        self._source_expected = array("d", [0.0])

    def observe(self, chain: Sequence[BlockHash], now: float, num_blocks: int) -> int:
        """A request for ``chain``, from its root, at ``now``.

        Returns how many of its leading blocks a pool that evicts by last use would have held, if
        it had room for ``num_blocks``.
        """
        keys = struct.unpack("<" + "Q8x" * len(chain), b"".join(chain))
        places, before = self._find(keys)
        known = max((i + 1 for i, past in enumerate(before) if past != _NONE), default=0)
        hits = self._lru_hits(before)
        request = self._request(keys, known, before[known - 1] if known else _NONE)
        start, end = 0, len(keys)
        while start < end:
            past, stop = before[start], start + 1
            while stop < end and before[stop] == past and (past != _NONE or stop < end - 1):
                stop += 1
            if past != _NONE:
                self._returned(past, stop - start, now)
            used = self._use(request, past, stop - start, now, last=stop == end)
            for key, place in zip(keys[start:stop], places[start:stop], strict=True):
                self._table[place] = (key >> _ID_BITS << _ID_BITS) | used
            start = stop
        self._grow_older(now)
        self._lru_evict(num_blocks)
        return hits

    def class_of(self, block: BlockHash) -> int:
        """Class of the last use of a block; `UNKNOWN` if that was not seen or is forgotten."""
        past = self._find(struct.unpack_from("<Q", block))[1][0]
        return UNKNOWN if past == _NONE else self._class[past & self._ring]

    def _find(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Places of ``keys`` in the table and their stretches. A key has two places; one that is
        new takes that of the older stretch."""
        table, mask = self._table, self._mask
        oldest = self._newest - self._ring + len(keys)  # so many may be overwritten by this call
        places, found = [], []
        for key in keys:
            place, tag = key & mask, key >> _ID_BITS
            entry = table[place]
            if entry >> _ID_BITS != tag:
                other = table[place ^ 1]
                if other >> _ID_BITS == tag or other & _ID < entry & _ID:
                    place, entry = place ^ 1, other
            past = entry & _ID
            places.append(place)
            found.append(past if past and past >= oldest and entry >> _ID_BITS == tag else _NONE)
        return places, found

    def _lru_hits(self, before: Sequence[int]) -> int:
        """LRU holds the stretches from a hand on: those used last, so many as there is room for."""
        here = [past >= self._lru_hand for past in before]
        self._lru_blocks += len(before) - sum(here)
        return here.index(False) if False in here else len(here)

    def _lru_evict(self, num_blocks: int) -> None:
        hand = max(self._lru_hand, self._newest - self._ring)
        while hand < self._newest and self._lru_blocks > num_blocks:
            self._lru_blocks -= self._alive[hand & self._ring]
            hand += 1
        self._lru_hand = hand

    def _request(self, keys: Sequence[int], known: int, above: int) -> _Request:
        """What is equal for all stretches of a request; ``above`` is the deepest known one."""
        new = len(keys) - known
        if above == _NONE:
            return _Request(goes_on=False, new=new, source=0)
        hits, source = self._hits[above & self._ring], self._source[above & self._ring]
        if hits < HUB_HITS:
            return _Request(goes_on=True, new=new, source=source)
        return _Request(goes_on=False, new=new, source=self._named(keys[known - 1], source, new))

    def _named(self, key: int, source: int, new: int) -> int:
        """The source of what follows a template: the template, by its last block."""
        if not new:
            return source
        known = self._sources.pop(key, 0)
        if not known:
            if len(self._sources) < MOST_SOURCES:
                known = len(self._source_returned)
                self._source_returned.append(0.0)
                self._source_expected.append(0.0)
            else:
                known = self._sources.pop(next(iter(self._sources)))  # the one not seen for longest
                self._source_returned[known] = self._source_expected[known] = 0.0
        self._sources[key] = known
        return known

    def _use(self, request: _Request, past: int, size: int, now: float, *, last: bool) -> int:
        """Start a stretch of ``size`` blocks, the successor of ``past``. Returns its number."""
        hits, gap_s = 0, None
        if past != _NONE:
            hits = self._hits[past & self._ring] + 1
            gap_s = now - self._used_at[past & self._ring]
        kind = self.model.classify(
            Features(
                request=_request_feature(request, hits),
                hits=_hits_feature(hits, last),
                source=self._source_feature(request.source),
                gap=0 if gap_s is None else 1 + min(5, int(math.log2(gap_s + 1)) // 2),
            )
        )
        self._newest += 1
        at = self._newest & self._ring
        self._used_at[at], self._class[at], self._hits[at] = now, kind, hits
        self._size[at] = self._alive[at] = size
        self._source[at], self._bucket[at] = request.source, 0
        self.model.entered(kind, 0, 1.0)
        return self._newest

    def _source_feature(self, source: int) -> int:
        """Half octaves by which reuse was above what is expected without knowing the source."""
        if not source:
            return 0
        returned = self._source_returned[source] + SOURCE_WEIGHT
        return max(
            -4,
            min(
                4, round(2 * math.log2(returned / (self._source_expected[source] + SOURCE_WEIGHT)))
            ),
        )

    def _returned(self, past: int, blocks: int, now: float) -> None:
        """``blocks`` of a stretch are used again."""
        at = past & self._ring
        weight = blocks / self._size[at]
        self._alive[at] -= min(blocks, self._alive[at])
        kind, age = self._class[at], bucket(now - self._used_at[at])
        for passed in range(self._bucket[at], age):  # the hand has not come by yet
            self.model.passed(kind, passed, weight)
        self.model.returned(kind, age, weight)
        self._source_returned[self._source[at]] += weight

    def _grow_older(self, now: float) -> None:
        """Move the stretches whose age passed the end of their bucket into the next."""
        oldest, newest, ring, used_at = (
            self._newest - self._ring,
            self._newest,
            self._ring,
            self._used_at,
        )
        for age, hand in enumerate(self._hands):
            edge = now - EDGES_S[age + 1]
            if used_at[hand & ring] > edge and hand >= oldest:
                continue
            hand = max(hand, oldest)
            while hand <= newest and used_at[hand & ring] <= edge:
                self._pass(hand & ring, age)
                hand += 1
            self._hands[age] = hand

    def _pass(self, at: int, age: int) -> None:
        self._bucket[at] = age + 1
        if alive := self._alive[at]:
            weight, kind = alive / self._size[at], self._class[at]
            expected = self.model.passed(kind, age, weight)
            self._source_expected[self._source[at]] += expected


def _request_feature(request: _Request, hits: int) -> int:
    new = min(MOST_NEW, request.new.bit_length())
    return new + 16 * request.goes_on + 32 * (hits > 0)


def _hits_feature(hits: int, last: bool) -> int:
    """The last new block of a request stands alone: it is partial or ends in an answer."""
    return min(5, hits.bit_length()) if hits else 6 + last
