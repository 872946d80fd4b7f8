"""Remembers the tokens of rendered chats, so that the next turn tokenises only what is new.

A text may be cut where a special token starts: a tokenizer first splits the text at its added
tokens, leftmost and longest, then normalises and encodes each piece on its own. So the tokens
before such a place depend on nothing behind it, and the rest encodes alone as it would in the
whole. That holds for tokens that are matched in the raw text, take no white space from the left,
and are part of no other added token; a tokenizer with tokens that look at whole words has none.
The pieces between such places form a tree, in which texts that begin alike share a path; pieces
are compared by their text, so no two are ever taken for each other.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from operator import add
from sys import getsizeof
from threading import Lock

from msgspec import Struct
from tokenizers import AddedToken

from prefixfleet.router.added_tokens import cuts_of, pattern_of
from prefixfleet.router.rendered import Rendered

MAX_KNOWN_BYTES = 64_000_000
"""Of one model: token ids, texts, places and hashes. 4 million tokens of plain chats."""
MAX_PIECES = 4_096
"""A prompt of more is not remembered: its client wrote them, and each costs a place."""
_PIECE_BYTES = 330  # a place and its key, or the key of one that is known to others too
MAX_SHORT_PIECES = 4_096
SHORT_CHARACTERS = 48
"""Pieces up to this length are remembered wherever they stand: those that a template puts around
every message."""
MIN_CHARACTERS = 400
"""A shorter text is tokenised in less time than it takes to look it up."""


_Key = tuple[int | str, str]
"""Of a place: that of the place before it, or the owner where a text begins; and the piece."""


class _Place(Struct, eq=False):
    """The end of a piece: its number, the newest prompt that has all before it, and their count."""

    key: _Key
    number: int
    rendered: Rendered
    tokens: int


class _Prompt(Struct, eq=False):
    """What is remembered of one: the keys of all its places, and what it was charged in all."""

    rendered: Rendered
    keys: list[_Key]
    text_bytes: int
    num_bytes: int


class KnownPrefixes:
    """Owned by one model's `Tokens`; safe to use from several threads."""

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        cuts = cuts_of(added)
        self._cuts, self._cut_ids = frozenset(cuts.values()), frozenset(cuts)
        raw = {token.content for token in added.values() if not token.normalized}
        self._all_cut = raw == self._cuts
        self._pattern = pattern_of(raw) if cuts else None
        self._lock = Lock()
        self._numbers = count()
        self._places: dict[_Key, _Place] = {}
        self._age: OrderedDict[int, _Prompt] = OrderedDict()
        self._num_bytes = 0
        self._short: dict[tuple[str, str], Sequence[int]] = {}

    def __len__(self) -> int:
        """Tokens remembered."""
        with self._lock:
            return sum(len(prompt.rendered.token_ids) for prompt in self._age.values())

    @property
    def num_bytes(self) -> int:
        """Memory of what is remembered, about; at most `MAX_KNOWN_BYTES`."""
        return self._num_bytes

    def encode(
        self, text: str, encode: Callable[[str], Sequence[int]], owner: str = ""
    ) -> Rendered:
        """``encode(text)``, calling it only with what follows the longest known prefix.

        Only what the same ``owner`` asked before is known: the time it takes tells nobody what
        others ask.
        """
        if self._pattern is None or len(text) < MIN_CHARACTERS:
            return Rendered(encode(text))
        pieces = self._pieces_of(text)
        if len(pieces) > MAX_PIECES:
            return Rendered(encode(text))
        with self._lock:
            keys, path = self._path(pieces, owner)
            if len(path) == len(pieces) and (whole := self._again(path)):
                return whole
        new = pieces[len(path) :]
        ids, ends = self._encoded(new, encode, owner)
        if path:
            rendered = path[-1].rendered.continued(path[-1].tokens, ids)
        else:
            rendered = Rendered(array("I", ids))
        if ends is not None:
            with self._lock:
                self._remember(rendered, owner, keys, path, zip(new, ends, strict=True))
                self._charge(rendered, keys, 2 * getsizeof(text))  # and once more, as UTF-8
        return rendered

    def _pieces_of(self, text: str) -> list[str]:
        """The text in pieces, each but the first beginning with a token that may be cut at."""
        assert self._pattern is not None
        cuts = self._cuts
        if self._all_cut:
            first, *others = self._pattern.split(text)
            pieces = list(map(add, others[::2], others[1::2]))
            return [first, *pieces] if first or not pieces else pieces
        starts = [match.start() for match in self._pattern.finditer(text) if match[0] in cuts]
        if not starts or starts[0]:
            starts.insert(0, 0)
        ends = [*starts[1:], len(text)]
        return [text[start:end] for start, end in zip(starts, ends, strict=True)]

    def _path(self, pieces: Sequence[str], owner: str) -> tuple[list[_Key], list[_Place]]:
        """The places from the beginning on that are known, and their keys."""
        at: int | str = owner
        keys: list[_Key] = []
        path: list[_Place] = []
        for piece in pieces:
            key = (at, piece)
            place = self._places.get(key)
            if place is None:
                break
            keys.append(place.key)  # not ours: its text is there already
            path.append(place)
            at = place.number
        return keys, path

    def _again(self, path: Sequence[_Place]) -> Rendered | None:
        """The very prompt that ends with ``path``, if it is the newest of those that begin so."""
        rendered = path[-1].rendered
        prompt = self._age.get(id(rendered))
        if prompt is None or len(rendered.token_ids) != path[-1].tokens:
            return None
        self._charge(rendered, prompt.keys, prompt.text_bytes)
        for place in path:
            place.rendered = rendered
        return rendered

    def _encoded(
        self, pieces: Sequence[str], encode: Callable[[str], Sequence[int]], owner: str
    ) -> tuple[list[int], list[int] | None]:
        """Ids of ``pieces``, and their number up to the end of each piece; None instead of these
        if the tokenizer splits otherwise than we think: then nothing is built on this text."""
        closing: list[Sequence[int]] = []
        while len(closing) < len(pieces):
            known = self._short.get((owner, pieces[-1 - len(closing)]))
            if known is None:
                break
            closing.append(known)
        rest = pieces[: len(pieces) - len(closing)]
        ids = list(encode("".join(rest))) if rest else []
        ends = self._ends(rest, ids)
        whole = len(ends) == len(rest)
        if whole:
            self._note_short(rest, ids, ends, owner)
        for known in reversed(closing):
            ids += known
            ends.append(len(ids))
        return ids, ends if whole else None

    def _ends(self, pieces: Sequence[str], ids: Sequence[int]) -> list[int]:
        """Where pieces end in ``ids``: at tokens that may be cut at. One for each, as a rule."""
        if len(pieces) == 1 and pieces[0] and self._cut_ids.isdisjoint(ids[1:]):
            return [len(ids)]
        starts = [number for number, token in enumerate(ids) if token in self._cut_ids]
        if pieces and pieces[0] and not (starts and starts[0] == 0):
            starts.insert(0, 0)  # the beginning of a text that begins with no such token
        return [*starts[1:], len(ids)] if starts else []

    def _note_short(
        self, pieces: Sequence[str], ids: Sequence[int], ends: Sequence[int], owner: str
    ) -> None:
        start = 0
        for piece, end in zip(pieces, ends, strict=True):
            if len(piece) <= SHORT_CHARACTERS and self._begins_with_cut(piece):
                if len(self._short) >= MAX_SHORT_PIECES:
                    self._short = {}
                self._short[owner, piece] = ids[start:end]
            start = end

    def _begins_with_cut(self, piece: str) -> bool:
        assert self._pattern is not None
        match = self._pattern.match(piece)
        return match is not None and match[0] in self._cuts

    def _remember(
        self,
        rendered: Rendered,
        owner: str,
        keys: list[_Key],
        path: Sequence[_Place],
        new: Iterable[tuple[str, int]],
    ) -> None:
        for place in path:  # the newest prompt stands for all that it shares
            place.rendered = rendered
        at: int | str = path[-1].number if path else owner
        before = path[-1].tokens if path else 0
        for piece, end in new:
            key = (at, piece)
            keys.append(key)
            known = self._places.get(key)  # another thread may have been faster
            place = known or _Place(key, next(self._numbers), rendered, before + end)
            place.rendered = rendered
            self._places[key] = place
            at = place.number

    def _charge(self, rendered: Rendered, keys: list[_Key], text_bytes: int) -> None:
        """Note the prompt as the newest, with what it takes by now: its chains may have grown."""
        known = self._age.pop(id(rendered), None)
        size = rendered.num_bytes + len(keys) * _PIECE_BYTES + text_bytes
        self._num_bytes += size - (known.num_bytes if known else 0)
        self._age[id(rendered)] = _Prompt(rendered, keys, text_bytes, size)
        while self._num_bytes > MAX_KNOWN_BYTES:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, oldest = self._age.popitem(last=False)
        self._num_bytes -= oldest.num_bytes
        for key in oldest.keys:
            place = self._places.get(key)
            if place is not None and place.rendered is oldest.rendered:
                del self._places[key]
