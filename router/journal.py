"""Whose load changed since somebody last asked: a bounded list of names, read by position."""

from collections.abc import Iterable

MAX_KEPT = 20_000
"""Changes kept for those that read. Who asks later than that has to look at everybody anew."""


class Journal:
    """Owned by one `Book`; its readers keep their own positions."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._dropped = 0

    @property
    def end(self) -> int:
        """The position behind the last change."""
        return self._dropped + len(self._names)

    def note(self, name: str) -> None:
        """``name`` changed."""
        self._names.append(name)
        if len(self._names) > MAX_KEPT:
            half = MAX_KEPT // 2
            del self._names[:half]
            self._dropped += half

    def since(self, position: int) -> Iterable[str] | None:
        """Names that changed since ``position`` was the end, each once and always in the same
        order; None if that is too long ago."""
        if position < self._dropped:
            return None
        return dict.fromkeys(self._names[position - self._dropped :])
