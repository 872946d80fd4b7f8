"""A model's chat template, rendered the way Hugging Face renders it.

Templates come from the model's folder and are as trusted as its weights; a template that a
client sends is never rendered here. They run in Jinja's sandbox all the same.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = dict[str, Any]

_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message to continue. The engine's own mark: a template that prints it twice
shows it in the prompt."""


_OF_DICTS = frozenset(dir(dict))
_RAISED_BY_TEMPLATES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class TemplateRefused(Exception):
    """The template does not render this chat; the engine will say why."""


class ChatTemplate:
    """One compiled template. Immutable and safe to render from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._template = environment().from_string(source)
        # a plain copy: Jinja's own is a chain of maps, slow to walk, and walked at every rendering
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,  # noqa: ANN401 - whatever the template asks for
    ) -> str:
        """The prompt's text. ``variables`` win over the special tokens of the same name.

        Raises:
            TemplateRefused: the template raised, or there is no final message to continue.
        """
        if not messages or (continue_final_message and add_generation_prompt):
            raise TemplateRefused("nothing to render, or two contradicting options")
        given = {**self._special_tokens, "documents": None, **variables}
        try:
            text = self._template.render(
                messages=_open_ended(messages) if continue_final_message else messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except _RAISED_BY_TEMPLATES as error:
            raise TemplateRefused(str(error)) from error
        return _cut_at_end(text, messages[-1]) if continue_final_message else text


def _open_ended(messages: Sequence[Message]) -> list[Message]:
    """The chat with a mark at the end of the text that the model shall continue."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CUT
    elif isinstance(content, list) and (texts := [p for p in content if "text" in p]):
        marked = texts[-1]
        last["content"] = [
            {**part, "text": part["text"] + _CUT} if part is marked else part for part in content
        ]
    else:
        raise TemplateRefused("continue_final_message: the final message has no text")
    return [*messages[:-1], last]


def _cut_at_end(text: str, final: Message) -> str:
    content = final["content"]
    spoken = (
        content if isinstance(content, str) else [p for p in content if "text" in p][-1]["text"]
    )
    at = text.rfind(_CUT.strip())
    if at < 0 or spoken.strip() not in text:
        raise TemplateRefused("continue_final_message: the template changes the final message")
    # A template that strips messages took the mark's last space too: strip what it would have
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


def environment() -> jinja2.Environment:
    """The environment that every chat template runs in."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now_as
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Looks a message's fields up without trying them as attributes first: it has no such ones."""

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - Jinja's own interface
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(  # Jinja's own filter escapes HTML, which no model was trained on
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now_as(form: str) -> str:
    return datetime.now().strftime(form)
