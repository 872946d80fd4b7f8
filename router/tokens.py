"""A model's tokenizer: prompts and chats to exactly the token ids that its engine computes.

Loaded from the model's folder with the `tokenizers` library alone. `load_tokens` reads files
and takes up to seconds: call it in a thread. What comes out is thread-safe.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from prefixfleet.router.content_flow import only_passes_contents
from prefixfleet.router.content_format import wants_parts
from prefixfleet.router.known_prefixes import KnownPrefixes
from prefixfleet.router.messages import NotText, conversation, tool_schemas
from prefixfleet.router.outlines import Outlines
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.template import ChatTemplate, environment
from prefixfleet.store.errors import ConfigError

# The library's own threads gain nothing for one text, and cost a switch for each
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokens:
    """One model's tokenizer and chat templates. Fixed, but for what it remembers of prompts."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._known = KnownPrefixes(tokenizer.get_added_tokens_decoder())
        self._templates = {
            name: _Template(source, special_tokens) for name, source in templates.items()
        }

    def of_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a completion's prompt. Releases the GIL."""
        # The form without offsets: it takes two thirds of the time
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def of_chat(self, text: str, owner: str = "") -> Rendered:
        """Token ids of a rendered chat; what an earlier turn of ``owner`` has in common with it
        is not done again."""
        return self._known.encode(
            text, lambda part: self.of_text(part, add_special_tokens=False), owner
        )

    def render(
        self,
        messages: Sequence[object],
        tools: Sequence[object] | None = None,
        /,
        **variables: Any,  # noqa: ANN401 - whatever the template asks for
    ) -> str:
        """Text of a chat's prompt; see `ChatTemplate.render` for the variables.

        Raises:
            NotText: the chat is more than text, or the model has no template.
            TemplateRefused: the template refuses the chat.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise NotText("the model has no chat template")
        if template.outlines is not None and tools is None:
            text = template.outlines.fill(messages, variables)
            if text is not None:
                return text
        chat = conversation(
            messages, as_parts=template.as_parts, knows_developer=template.knows_developer
        )
        schemas = None if tools is None else tool_schemas(tools)
        return template.chat_template.render(chat, tools=schemas, **variables)


class _Template:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.chat_template = ChatTemplate(source, special_tokens)
        self.as_parts = wants_parts(source, environment())
        self.outlines = None
        if not self.as_parts and only_passes_contents(source, environment()):
            self.outlines = Outlines(lambda chat, given: self.chat_template.render(chat, **given))
        self.knows_developer = '"developer"' in source or "'developer'" in source


def load_tokens(folder: Path) -> Tokens:
    """The tokenizer in a model's folder.

    Raises:
        ConfigError: a file is absent or cannot be used; says which.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{folder / 'tokenizer.json'}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    named = _read_json(folder / "special_tokens_map.json") | config
    try:
        return Tokens(tokenizer, _templates(folder, config), _special_tokens(named))
    except jinja2.TemplateError as error:
        raise ConfigError(f"{folder}: chat template: {error}") from error


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files win over ``tokenizer_config.json``, as in transformers."""
    files = {p.stem: p for p in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        files["default"] = main
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    given = config.get("chat_template")
    if isinstance(given, list):
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    return {"default": given} if isinstance(given, str) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(f"{name}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[f"{name}_token"] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: got {type(values).__name__}, expected a JSON object")
    return values
