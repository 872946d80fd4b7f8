"""Remembers the tokens of rendered chats, so that the next turn tokenises only what is new.

A text may be cut where a special token starts: a tokenizer first splits the text at its added
tokens, leftmost and longest, then normalises and encodes each piece on its own. So the tokens
before such a place depend on nothing behind it, and the rest encodes alone as it would in the
whole. That holds for tokens that are matched in the raw text, take no white space from the left,
and are part of no other added token; a tokenizer with tokens that look at whole words has none.
The pieces between such places form a tree, in which texts that begin alike share a path; pieces
are compared by their text, so no two are ever taken for each other.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import add
from threading import Lock

from tokenizers import AddedToken

from prefixfleet.store.chain import BlockHash, extend_chain

MAX_KNOWN_TOKENS = 4_000_000
"""Of one model: 16 MB of token ids, as much of hashes, and as much of text."""
MAX_SHORT_PIECES = 4_096
SHORT_CHARACTERS = 64
"""Pieces up to this length are remembered wherever they stand: those that a template puts around
every message."""
MIN_CHARACTERS = 400
"""A shorter text is tokenised in less time than it takes to look it up."""


@dataclass(slots=True, eq=False)
class Rendered:
    """Token ids of one rendered prompt, and the hash chains that were computed of them.

    Immutable but for the memo of chains, whose entries only ever grow to the same values.
    """

    token_ids: Sequence[int] = ()
    _chains: dict[tuple[BlockHash, int], list[BlockHash]] = field(default_factory=dict)

    def chain(self, root: BlockHash, block_tokens: int, key: bytes) -> list[BlockHash]:
        """`extend_chain` of all token ids from ``root``; only what is new is hashed."""
        known = self._chains.get((root, block_tokens), [])
        if len(known) < len(self.token_ids) // block_tokens:
            rest = self.token_ids[len(known) * block_tokens :]
            known = known + extend_chain(known[-1] if known else root, rest, block_tokens, key)
            self._chains[root, block_tokens] = known
        return known

    def continued(self, count: int, rest: Sequence[int]) -> "Rendered":
        """The prompt that shares the first ``count`` tokens and goes on with ``rest``."""
        token_ids = array("I", self.token_ids[:count])
        token_ids.extend(rest)
        chains = {
            (root, size): chain[: count // size] for (root, size), chain in self._chains.items()
        }
        return Rendered(token_ids, chains)


_Key = tuple[int | str, str]
"""Of a place: that of the place before it, or the owner where a text begins; and the piece."""


@dataclass(slots=True, eq=False)
class _Place:
    """The end of a piece: its number, the newest prompt that has all before it, and their count."""

    number: int
    rendered: Rendered
    tokens: int


class KnownPrefixes:
    """Owned by one model's `Tokens`; safe to use from several threads."""

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        cuts = _cuts_of(added)
        self._cuts, self._cut_ids = frozenset(cuts.values()), frozenset(cuts)
        self._cut_texts = tuple(self._cuts)
        raw = {token.content for token in added.values() if not token.normalized}
        self._all_cut = raw == self._cuts
        self._pattern = _pattern_of(raw) if cuts else None
        self._lock = Lock()
        self._numbers = count()
        self._places: dict[_Key, _Place] = {}
        self._age: OrderedDict[int, tuple[Rendered, list[_Key]]] = OrderedDict()
        self._tokens = 0
        self._short: dict[tuple[str, str], Sequence[int]] = {}

    def __len__(self) -> int:
        """Tokens remembered."""
        return self._tokens

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
            keys.append(key)
            path.append(place)
            at = place.number
        return keys, path

    def _again(self, path: Sequence[_Place]) -> Rendered | None:
        """The very prompt that ends with ``path``, if it is the newest of those that begin so."""
        rendered = path[-1].rendered
        if len(rendered.token_ids) != path[-1].tokens or id(rendered) not in self._age:
            return None
        self._age.move_to_end(id(rendered))
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
        starts = [number for number, token in enumerate(ids) if token in self._cut_ids]
        if rest and rest[0] and not (starts and starts[0] == 0):
            starts.insert(0, 0)  # the beginning of a text that begins with no such token
        ends = [*starts[1:], len(ids)] if starts else []
        whole = len(ends) == len(rest)
        if whole:
            self._note_short(rest, ids, ends, owner)
        for known in reversed(closing):
            ids += known
            ends.append(len(ids))
        return ids, ends if whole else None

    def _note_short(
        self, pieces: Sequence[str], ids: Sequence[int], ends: Sequence[int], owner: str
    ) -> None:
        start = 0
        for piece, end in zip(pieces, ends, strict=True):
            if len(piece) <= SHORT_CHARACTERS and piece.startswith(self._cut_texts):
                if len(self._short) >= MAX_SHORT_PIECES:
                    self._short = {}
                self._short[owner, piece] = ids[start:end]
            start = end

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
            place = known or _Place(next(self._numbers), rendered, before + end)
            place.rendered = rendered
            self._places[key] = place
            at = place.number
        self._age[id(rendered)] = (rendered, keys)
        self._tokens += len(rendered.token_ids)
        while self._tokens > MAX_KNOWN_TOKENS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (rendered, keys) = self._age.popitem(last=False)
        self._tokens -= len(rendered.token_ids)
        for key in keys:
            place = self._places.get(key)
            if place is not None and place.rendered is rendered:
                del self._places[key]


def _cuts_of(added: Mapping[int, AddedToken]) -> dict[int, str]:
    """Added tokens before which a text may be cut, by id."""
    if any(token.single_word for token in added.values()):
        return {}
    texts = [token.content for token in added.values()]
    return {
        number: token.content
        for number, token in added.items()
        if not token.normalized
        and not token.lstrip
        and sum(token.content in text for text in texts) == 1
    }


def _pattern_of(raw: Iterable[str]) -> re.Pattern[str]:
    """Finds added tokens in a raw text as the tokenizer does: leftmost, and longest of those."""
    texts = sorted(raw, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})")
