"""The three request forms of a chat, brought to what a template is rendered with. Pure.

OpenAI's chat completions, OpenAI's responses and Anthropic's messages, the latter two only as far
as they are plain text: then vLLM makes these very messages of them. Everything else (tools,
stored responses, images, thinking) raises `NotText` and is routed by load.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from prefixfleet.router.body import Body
from prefixfleet.router.messages import ATTRIBUTION, NotText

_RESERVED = {"chat_template", "tokenize", "tools", "messages", "conversation", "return_dict"}
_INPUT_TEXT = {"input_text", "text"}


class Chat(Struct, frozen=True, kw_only=True):
    """What is rendered: messages, tools and the template's variables."""

    messages: Sequence[object]
    tools: Sequence[object] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def chat_completion(body: Body) -> Chat:
    """The chat of ``/v1/chat/completions``. Raises `NotText`."""
    messages = body.get("messages", list)
    if messages is None:
        raise NotText("no list of messages")
    own: dict[str, Any] = {
        "add_generation_prompt": body.get("add_generation_prompt", bool) is not False,
        "continue_final_message": body.get("continue_final_message", bool) is True,
    }
    if (documents := body.get("documents", list)) is not None:
        own["documents"] = documents
    if (effort := body.get("reasoning_effort", str)) is not None:
        own |= _effort(body, effort)
    return Chat(messages=messages, tools=body.get("tools", list), variables=_variables(body, own))


def responses(body: Body) -> Chat:
    """The chat of ``/v1/responses``. Raises `NotText`."""
    _refuse(body, "tools", "previous_response_id", "previous_input_messages", "prompt")
    messages: list[object] = []
    if instructions := body.get("instructions", str):
        messages.append({"role": "system", "content": instructions})
    text = body.get("input", str)
    if text is not None:
        messages.append({"role": "user", "content": text})
    else:
        messages += [_input_message(item) for item in body.get("input", list[Any]) or ()]
    reasoning = body.get("reasoning", dict[str, Any]) or {}
    own = {"add_generation_prompt": True, **_effort(body, reasoning.get("effort"))}
    return Chat(messages=messages, variables=_variables(body, own))


def anthropic_messages(body: Body) -> Chat:
    """The chat of Anthropic's ``/v1/messages``. Raises `NotText`."""
    _refuse(body, "tools", "tool_choice", "thinking", "output_config")
    messages: list[object] = []
    if system := _system_text(body):
        messages.append({"role": "system", "content": system})
    messages += [_anthropic_message(entry) for entry in body.get("messages", list[Any]) or ()]
    return Chat(messages=messages, variables=_variables(body, {"add_generation_prompt": True}))


def _variables(body: Body, own: dict[str, Any]) -> dict[str, Any]:
    """The template's variables; the request's own fields win over ``chat_template_kwargs``."""
    given = body.get("chat_template_kwargs", dict[str, Any]) or {}
    if given and _RESERVED & given.keys():
        raise NotText("chat_template_kwargs overrides the request")
    return given | {name: value for name, value in own.items() if value not in (None, "auto")}


def _effort(body: Body, effort: object) -> dict[str, Any]:
    if not isinstance(effort, str):
        return {}
    given = body.get("chat_template_kwargs", dict[str, Any]) or {}
    thinking = {} if "enable_thinking" in given else {"enable_thinking": effort != "none"}
    return {"reasoning_effort": effort, **thinking}


def _refuse(body: Body, *names: str) -> None:
    for name in names:
        if body.is_set(name):
            raise NotText(f"{name} is set")


def _input_message(item: object) -> dict[str, Any]:
    """An input item that is a user's or system's message of texts."""
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise NotText("an input item that is no message")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "system", "developer") or item.keys() - {"type", "role", "content"}:
        raise NotText(f"an input message of role {role!r:.40}")
    if isinstance(content, list):
        content = [{"type": "text", "text": _text(part, _INPUT_TEXT)} for part in content]
    return {"role": role, "content": content}


def _system_text(body: Body) -> str:
    blocks = body.get("system", str | list[Any])  # type: ignore[arg-type]  # msgspec takes unions
    if not isinstance(blocks, list):
        return blocks or ""
    texts = [_text(block, {"text"}) for block in blocks]
    return "".join(text for text in texts if not text.startswith(ATTRIBUTION))


def _anthropic_message(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict) or (role := entry.get("role")) not in ("user", "assistant"):
        raise NotText("a message that is neither the user's nor the assistant's")
    content = entry.get("content")
    if isinstance(content, list):
        texts = [_text(block, {"text"}) for block in content]
        parts = [{"type": "text", "text": text} for text in texts if text]
        if not parts:
            raise NotText("a message without text")
        content = parts[0]["text"] if len(parts) == 1 else parts
    return {"role": role, "content": content}


def _text(part: object, kinds: set[str]) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None
    if not isinstance(text, str):
        raise NotText("a part that is no text")
    return text
