"""Remembers the tokens of rendered chats, so that the next turn tokenises only what is new.

A text may be cut where a special token starts: a tokenizer first splits the text at its added
tokens, leftmost and longest, then normalises and encodes each piece on its own. So the tokens
before such a place depend on nothing behind it, and the rest encodes alone as it would in the
whole. That holds for tokens that are matched in the raw text, take no white space from the left,
and are part of no other added token; a tokenizer with tokens that look at whole words has none.
"""

import hashlib
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from tokenizers import AddedToken

from prefixfleet.store.chain import BlockHash, extend_chain

MAX_KNOWN_TOKENS = 4_000_000
"""Of one model: 16 MB of token ids and as much of hashes."""
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A cut: where its special token starts and ends, and the key of the text up to that end."""

    start: int
    key: bytes


class KnownPrefixes:
    """Owned by one model's `Tokens`; safe to use from several threads."""

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        cuts = _cuts_of(added)
        self._cuts, self._cut_ids = frozenset(cuts.values()), frozenset(cuts)
        self._pattern = _pattern_of(added) if cuts else None
        self._secret = secrets.token_bytes(16)  # nobody outside can make two texts collide
        self._lock = Lock()
        self._places: dict[bytes, tuple[Rendered, int]] = {}
        self._age: OrderedDict[int, tuple[Rendered, list[bytes]]] = OrderedDict()
        self._tokens = 0

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
        places = self._places_in(text, owner)
        at, known, count = self._longest(places)
        if known is None:
            rendered = Rendered(array("I", encode(text)))
        else:
            rendered = known.continued(count, encode(text[places[at].start :]))
        self._remember(rendered, places, at, count)
        return rendered

    def _places_in(self, text: str, owner: str) -> list[_Place]:
        assert self._pattern is not None
        state = hashlib.blake2b(owner.encode() + b"\0", key=self._secret, digest_size=16)
        places, done = [], 0
        for match in self._pattern.finditer(text):
            if match.group() in self._cuts:
                state.update(text[done : match.end()].encode("utf-8", "surrogatepass"))
                done = match.end()
                places.append(_Place(match.start(), state.digest()))
        return places

    def _longest(self, places: Sequence[_Place]) -> tuple[int, Rendered | None, int]:
        with self._lock:
            for at in range(len(places) - 1, -1, -1):
                if found := self._places.get(places[at].key):
                    return at, *found
        return 0, None, 0

    def _remember(self, rendered: Rendered, places: Sequence[_Place], at: int, count: int) -> None:
        ids = rendered.token_ids
        counts = [i for i in range(count, len(ids)) if ids[i] in self._cut_ids]
        new = places[at:]
        if len(counts) != len(new):
            return  # the tokenizer splits otherwise than we think: never build on this text
        with self._lock:
            for place in places[:at]:  # the newest prompt stands for all that it shares
                if found := self._places.get(place.key):
                    self._places[place.key] = (rendered, found[1])
            for place, before in zip(new, counts, strict=True):
                self._places[place.key] = (rendered, before)
            self._age[id(rendered)] = (rendered, [place.key for place in places])
            self._tokens += len(ids)
            while self._tokens > MAX_KNOWN_TOKENS:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (rendered, keys) = self._age.popitem(last=False)
        self._tokens -= len(rendered.token_ids)
        for key in keys:
            if self._places.get(key, (None,))[0] is rendered:
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


def _pattern_of(added: Mapping[int, AddedToken]) -> re.Pattern[str]:
    """Finds added tokens in a raw text as the tokenizer does: leftmost, and longest of those."""
    texts = sorted((t.content for t in added.values() if not t.normalized), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)))
