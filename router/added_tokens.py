"""A tokenizer's added tokens: before which a text may be cut, and how they are found. Pure."""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from os.path import commonprefix

from tokenizers import AddedToken


def cuts_of(added: Mapping[int, AddedToken]) -> dict[int, str]:
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


def pattern_of(raw: Iterable[str]) -> re.Pattern[str]:
    """Finds added tokens in a raw text as the tokenizer does: leftmost, and longest of those.

    A tree, whose branches differ in their first characters: thousands of tokens that begin alike
    take no longer at a place than one, whatever a client repeats.
    """
    return re.compile(f"({_tree(sorted(set(raw)))})")


def _tree(texts: list[str]) -> str:
    """``texts`` are sorted; a text that is the beginning of others is tried after them."""
    ended = texts[0] == ""
    branches = []
    for _, group in groupby(texts[ended:], key=lambda text: text[0]):
        same = list(group)
        shared = commonprefix([same[0], same[-1]])  # noqa: RUF071 - of characters, not of paths
        rest = [text[len(shared) :] for text in same]
        branches.append(re.escape(shared) + (_tree(rest) if rest != [""] else ""))
    return f"(?:{'|'.join(branches)}){'?' if ended else ''}"
