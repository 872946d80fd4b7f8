"""Chats rendered without a template: its text around the contents is known for their roles.

Only for templates of which `content_flow` proves that they pass contents through, and for chats of
nothing but roles and texts. The first chat of every kind is rendered in full, with marks in the
place of its contents, and once more as it is: the two must agree.
"""

import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from prefixfleet.router.messages import ATTRIBUTION
from prefixfleet.router.template import Message

MAX_OUTLINES = 512
MAX_MESSAGES = 128  # of a chat with an outline: 12 MB for all of them
ROLES = frozenset({"system", "user", "assistant"})
MAX_VARIABLES = 256  # characters of names and texts: they are part of what is remembered
_LEFT, _RIGHT = "\u2003\u2002\u2003", "\u2002\u2003\u2002"
"""Around a mark: what a template strips is gone from there. They differ, so that what is between
two marks is known to be of the one before it or of the one behind it."""

log = logging.getLogger(__name__)

Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
_Hole = tuple[str, int, Callable[[str], str] | None]
"""Fixed text, the number of the content that follows it, and what is stripped from that."""
_Outline = tuple[Sequence[_Hole], str]


class Outlines:
    """Owned by one template; safe to use from several threads. ``render`` is the template's own
    way, which raises what it likes."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._lock = Lock()
        self._known: dict[object, _Outline] = {}
        self._secret = secrets.token_hex(8)  # nobody outside can write a mark
        self._mark = re.compile(f"({_LEFT})?<{self._secret} ([0-9]+)>({_RIGHT})?")
        self._off = False

    def __len__(self) -> int:
        """Outlines known."""
        return len(self._known)

    def fill(self, messages: Sequence[object], variables: Mapping[str, Any]) -> str | None:
        """The prompt's text, as `render` gives it; None for a chat that is not as simple."""
        if self._off or len(messages) > MAX_MESSAGES or variables.get("continue_final_message"):
            return None
        contents: list[str] = []
        key: list[object] = [len(messages)]
        if not (_take_messages(messages, key, contents) and _take_variables(variables, key)):
            return None
        outline = self._known.get(tuple(key))
        if outline is None:
            return self._first(tuple(key), contents, variables) if contents else None
        return _filled(outline, contents)

    def _first(
        self, key: tuple[object, ...], contents: Sequence[str], variables: Mapping[str, Any]
    ) -> str | None:
        marks = [f"{_LEFT}<{self._secret} {n}>{_RIGHT}" for n in range(len(contents))]
        outline = self._outline(self._render(_chat(key, marks), variables))
        text = self._render(_chat(key, contents), variables)
        if _filled(outline, contents) != text:
            with self._lock:
                self._off, self._known = True, {}
            log.error("a template does not render as it was read: it is rendered in full from now")
            return text
        with self._lock:
            if len(self._known) >= MAX_OUTLINES:
                self._known = {}
            if not self._off:
                self._known[key] = outline
        return text

    def _outline(self, text: str) -> _Outline:
        holes: list[_Hole] = []
        end = 0
        for mark in self._mark.finditer(text):
            holes.append((text[end : mark.start()], int(mark[2]), _strip(mark[1], mark[3])))
            end = mark.end()
        return holes, text[end:]


def _take_messages(messages: Sequence[object], key: list[object], contents: list[str]) -> bool:
    """Append roles and contents; False if there is anything else to a message."""
    for message in messages:
        if type(message) is not dict or len(message) != 2:
            return False
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or role not in ROLES or type(content) is not str:
            return False
        if not content or content.isspace() or content.startswith(ATTRIBUTION):
            return False
        key.append(role)
        contents.append(content)
    return True


def _take_variables(variables: Mapping[str, Any], key: list[object]) -> bool:
    """Append them; False if they are long, or more than texts and truth values (1 would equal
    True)."""
    left = MAX_VARIABLES
    for name, value in variables.items():
        left -= len(name)
        if type(value) is str:
            left -= len(value)
            if _LEFT in value or _RIGHT in value:
                return False
        elif type(value) is not bool:
            return False
        key += (name, value)
    return left >= 0


def _chat(key: Sequence[object], contents: Sequence[str]) -> list[Message]:
    roles = key[1 : 1 + len(contents)]
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


def _strip(before: str | None, after: str | None) -> Callable[[str], str] | None:
    if before:
        return None if after else str.rstrip
    return str.lstrip if after else str.strip


def _filled(outline: _Outline, contents: Sequence[str]) -> str:
    holes, rest = outline
    parts: list[str] = []
    for fixed, number, strip in holes:
        content = contents[number]
        parts += (fixed, content if strip is None else strip(content))
    parts.append(rest)
    return "".join(parts)
