"""Real text for the demo: the project's own documents, or the source of the installed package.

Must not know engines; it deals in characters, at about `CHARACTERS_PER_TOKEN` a token.
"""

from collections.abc import Iterator
from pathlib import Path

from prefixfleet.store.errors import ConfigError

CHARACTERS_PER_TOKEN = 3.9
"""Of English prose and Python with the demo model's tokenizer; measured on this project's text."""
DOCUMENTS = ("README.md", "DESIGN.md", "CHANGELOG.md")
PACKAGES = ("store", "transfer", "router", "cluster", "kernels")
MIN_CHARACTERS = 60_000


def documents() -> list[tuple[str, str]]:
    """(name, text) of everything at hand, always in the same order, at least `MIN_CHARACTERS`.

    Raises:
        ConfigError: the installation holds no text, which a complete one does.
    """
    found = [*_checkout(), *_sources()]
    if sum(len(text) for _, text in found) < MIN_CHARACTERS:
        raise ConfigError("demo: this installation holds no source files to use as text")
    return found


def excerpts(count: int, tokens: int) -> list[str]:
    """``count`` different texts of about ``tokens`` tokens, cut from the documents in order.

    When the documents are used up, they are read again from another place.
    """
    text = "\n\n".join(text for _, text in documents())
    length = round(tokens * CHARACTERS_PER_TOKEN)
    whole = len(text) // length
    cuts = [i * length for i in range(whole)] + [i * length + length // 2 for i in range(whole - 1)]
    if count > len(cuts):
        raise ConfigError(f"demo: text for {len(cuts)} prompts of {tokens} tokens, got {count}")
    return [text[cut : cut + length] for cut in cuts[:count]]


def _checkout() -> Iterator[tuple[str, str]]:
    root = Path(__file__).resolve().parents[1]
    for name in DOCUMENTS:
        if (root / name).is_file() and (root / "pyproject.toml").is_file():
            yield name, (root / name).read_text(encoding="utf-8")


def _sources() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for file in sorted((Path(__file__).parents[1] / package).glob("*.py")):
            if file.stem != "__init__":
                yield f"{package}/{file.name}", file.read_text(encoding="utf-8")
