"""OpenAI messages to what a chat template gets, as vLLM normalises them before rendering.

Pure. Whatever is not plain text (images, audio, embeddings) raises `NotText`: such a request is
routed by load alone. Checked against vLLM 0.32 by the parity probes at every start.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefixfleet.router.template import Message

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
ATTRIBUTION = "x-anthropic-billing-header"


class NotText(Exception):
    """The chat holds more than text, or has a form that only the engine may judge."""


def conversation(
    messages: Sequence[object], *, as_parts: bool, knows_developer: bool
) -> list[Message]:
    """The chat as its template expects it.

    ``as_parts`` if the template loops over a message's content (then texts stay parts), else
    every content becomes one text. ``knows_developer`` if it has a branch for that role.

    Raises:
        NotText: see there.
    """
    if not messages:
        raise NotText("no messages")
    chat = [_message(message, as_parts) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in chat):
        chat = _one_system_message(chat)
    return chat


def tool_schemas(tools: Sequence[object]) -> list[dict[str, Any]]:
    """Tools with the fields, defaults and order that the engine gives them.

    Raises:
        NotText: a tool that the engine will refuse.
    """
    return [_tool(tool) for tool in tools]


def _message(message: object, as_parts: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise NotText("a message is no object or has no role")
    content = _contents(message.get("content"), strip_attribution=role == "system")
    result: Message = {
        "role": role,
        # Joined to one text, empty parts leave no line; as parts they stay
        "content": content if as_parts else "\n".join(p["text"] for p in content if p["text"]),
    }
    if role == "assistant":
        result |= _of_assistant(message)
    elif role == "tool":
        if as_parts:  # most templates take a tool's answer as one text only
            result["content"] = "\n".join(part["text"] for part in content)
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    if role == "developer":
        if message.get("tools"):
            raise NotText("tools of a developer message, which the engine puts in another form")
        result["tools"] = None
    return result


def _contents(content: object, *, strip_attribution: bool) -> list[dict[str, str]]:
    if content is None:
        return []
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise NotText("content is neither text nor a list")
    texts = [text for part in parts if (text := _text(part)) is not None]
    if strip_attribution:
        texts = [kept for text in texts if (kept := _without_attribution(text)) is not None]
    return [{"type": "text", "text": text} for text in texts]


def _text(part: object) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("uuid") is not None:
        raise NotText("a content part that is no text")
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None or part.keys() - {"type", field}:
        raise NotText(f"content part of type {kind!r}")
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise NotText("a text that is no string")
    return text


def _without_attribution(text: str) -> str | None:
    """Some clients put a line that changes with every request in front; the engine drops it."""
    if not text.startswith(ATTRIBUTION):
        return text
    return text.partition("\n")[2] or None


def _of_assistant(message: Mapping[str, Any]) -> Message:
    fields: Message = {}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise NotText("tool_calls is no list")
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    return fields


def _tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise NotText("a tool call without a function")
    if call.get("type", "function") != "function" or "name" not in function:
        raise NotText("a tool call that is no named function")
    # In the order of the engine's own schema: a template may print the whole object
    return {
        **({"id": call["id"]} if "id" in call else {}),
        "function": {"arguments": _arguments(function.get("arguments")), "name": function["name"]},
        **({"type": call["type"]} if "type" in call else {}),
    }


def _arguments(arguments: object) -> dict[str, Any]:
    """Arguments as a mapping; what is no JSON object becomes an empty one, as in the engine."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
        except RecursionError:
            raise NotText("arguments of a tool call that are nested too deeply") from None
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or "name" not in function:
        raise NotText("a tool without a named function")
    deferred = tool.get("defer_loading")
    schema = {name: function.get(name) for name in ("name", "description", "parameters")}
    schema |= {
        name: value
        for name, value in (
            ("strict", function.get("strict")),
            ("defer_loading", function.get("defer_loading", deferred)),
        )
        if value is not None
    }
    outer = {"type": tool.get("type", "function"), "function": schema}
    return outer if deferred is None else {**outer, "defer_loading": deferred}


def _one_system_message(chat: list[Message]) -> list[Message]:
    """Developer messages become system ones, and all of those one message at the front."""
    roles = ("system", "developer")
    orders = [message for message in chat if message["role"] in roles]
    if len(orders) == 1 and chat[0] is orders[0]:
        first = {k: v for k, v in orders[0].items() if k != "tools"}
        return [{**first, "role": "system"}, *chat[1:]]
    texts = [text for message in orders if (text := _whole_text(message["content"]))]
    return [
        {"role": "system", "content": "\n\n".join(texts)},
        *(message for message in chat if message["role"] not in roles),
    ]


def _whole_text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
