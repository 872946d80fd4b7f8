"""Does a worker compute the same tokens and hashes as this router? Asked before it gets traffic.

An engine with another chat template, tokenizer, block size, namespace or secret would answer
every request rightly and match nothing: the commonest silent fault of cache-aware routers. So
each worker is asked to tokenise a set of probes, and to compute one token after a prompt of a
block, whose hash it reports (`Outcome.head`). Any difference refuses it, with the reason.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec

from prefixfleet.router.messages import NotText
from prefixfleet.router.outcome import read_outcome
from prefixfleet.router.prompt import Prompt, prefix_chain
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.template import TemplateRefused
from prefixfleet.router.worker import Worker
from prefixfleet.store.errors import FleetError

PROBE_TIMEOUT_S = 60.0  # one token on a CPU engine that is still warming up
MEASURED_TOKENS = 500  # a second on a CPU engine; the smallest model takes as many
_SALT = "prefixfleet-parity"
_JSON = {"Content-Type": "application/json"}  # the router's session adds none by itself

_TEXTS = ("Hello, world!", "Ça va? Привет 你好 🙂 e\u0301\n\n\tdef f(x): return x", " leading", "")
_ASK = {"role": "user", "content": "Wie heißt die Hauptstadt von Österreich? 首都は"}
_ANSWER = {"role": "assistant", "content": "  Wien.\n"}
_RULES = {"role": "system", "content": "Answer in one word."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "Capital of a <country> & more",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}},
    },
}
_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [_ASK]},
    {"messages": [_RULES, _ASK, _ANSWER, _ASK]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts."}]}]},
    {"messages": [_ASK], "tools": [_TOOL]},
)


class ParityFailed(FleetError):
    """The worker computes something else than this router; it must get no traffic."""


class WorkerSilent(FleetError):
    """The worker did not answer, or not yet: ask again."""


async def check_parity(worker: Worker, key: bytes, session: aiohttp.ClientSession) -> None:
    """Returns if the worker agrees in everything. ``key`` is the fleet's `hash_key`.

    Raises:
        ParityFailed: it does not; says in what.
        WorkerSilent: it could not be asked.
    """
    await check_tokens(worker, session, chats=True)
    for salt in ("", _SALT):
        await _check_head(worker, key, salt, session)


async def check_tokens(worker: Worker, session: aiohttp.ClientSession, *, chats: bool) -> None:
    """The part of `check_parity` that any engine can answer; without ``chats`` texts only."""
    for question, ours in _questions(worker):
        if "messages" in question and not chats:
            continue
        answer = await _post(session, f"{worker.record.url}/tokenize", question)
        theirs = answer.get("tokens")
        if theirs != ours:
            raise ParityFailed(_difference(question, ours, theirs))


async def check_counts(worker: Worker, session: aiohttp.ClientSession) -> None:
    """For engines without ``/tokenize``: the number of prompt tokens in ``usage``, which says less.

    Raises as `check_parity`.
    """
    for question, ours in _questions(worker):
        if not ours:
            continue  # an empty prompt, or a chat that the template refuses
        path = "chat/completions" if "messages" in question else "completions"
        asked = question | {"max_tokens": 1}
        answer = await _post(session, f"{worker.record.url}/v1/{path}", asked)
        usage = answer.get("usage")
        theirs = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if theirs != len(ours):
            probe = question.get("prompt", question.get("messages"))
            raise ParityFailed(
                f"the engine counts {theirs} tokens in {probe!r:.120}, this router {len(ours)}; "
                "compare tokenizer and chat template in model_path with what the engine loaded"
            )


async def measure_prefill(worker: Worker, session: aiohttp.ClientSession) -> float:
    """Tokens a second of one prompt that the engine has not seen. Raises as `check_parity`."""
    most = worker.record.max_model_tokens // 2 or MEASURED_TOKENS
    ids = _filler_ids(worker, min(most, MEASURED_TOKENS))
    random.shuffle(ids)  # never found in the engine's cache
    question = {"model": worker.record.model, "prompt": ids, "max_tokens": 1}
    started_s = time.monotonic()
    if not await _post(session, f"{worker.record.url}/v1/completions", question):
        raise ParityFailed(
            f"the engine refuses a prompt of {len(ids)} tokens: set max_model_tokens, or "
            "prefill_tokens_per_s, in the worker's entry"
        )
    return len(ids) / max(1e-3, time.monotonic() - started_s)


def _questions(worker: Worker) -> Iterator[tuple[dict[str, Any], list[int] | None]]:
    """Bodies for ``/tokenize`` and the ids we expect; None where we expect a refusal."""
    model = worker.record.model
    for text in _TEXTS:
        yield {"model": model, "prompt": text}, worker.tokens.of_text(text)
    for chat in _CHATS:
        try:
            text = worker.tokens.render(chat["messages"], chat.get("tools"))
        except TemplateRefused:
            yield {"model": model, **chat}, None
        except NotText:
            continue  # a model without a template serves no chats
        else:
            yield {"model": model, **chat}, worker.tokens.of_text(text, add_special_tokens=False)


async def _check_head(
    worker: Worker, key: bytes, salt: str, session: aiohttp.ClientSession
) -> None:
    ids = _filler_ids(worker, worker.block_tokens + 1)
    prompt = Prompt(rendered=Rendered(ids), tokens=len(ids), salt=salt)
    ours = prefix_chain(prompt, worker.namespace, worker.block_tokens, key)[0].hex()
    question = {"model": worker.record.model, "prompt": ids, "max_tokens": 1}
    answer = await _post(
        session,
        f"{worker.record.url}/v1/completions",
        question | ({"cache_salt": salt} if salt else {}),
    )
    outcome = read_outcome(msgspec.json.encode(answer))
    if outcome is None:
        raise ParityFailed(
            "the engine reports no outcome of a prefix; is it started with prefixfleet's connector?"
        )
    if outcome.head != ours:
        raise ParityFailed(
            f"hash of the first block{' with a salt' if salt else ''}: the engine has "
            f"{outcome.head or 'none'}, this router {ours}; compare namespace, block size "
            f"({worker.block_tokens} tokens) and the cluster secret of both"
        )


def _filler_ids(worker: Worker, count: int) -> list[int]:
    ids = worker.tokens.of_text("parity of a prefix ", add_special_tokens=False)
    return (ids * count)[:count]


async def _post(
    session: aiohttp.ClientSession, url: str, question: dict[str, Any]
) -> dict[str, Any]:
    """The answer; {} if the engine refuses the question itself (400)."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    body = msgspec.json.encode(question)
    try:
        async with session.post(url, data=body, headers=_JSON, timeout=timeout) as response:
            content = await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise WorkerSilent(f"{url}: {type(error).__name__}: {error}") from error
    if response.status == 400:
        return {}
    if response.status != 200:
        raise WorkerSilent(f"{url}: status {response.status}")
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ParityFailed(f"{url}: the answer is no JSON object ({error})") from error


def _difference(question: dict[str, Any], ours: list[int] | None, theirs: object) -> str:
    probe = question.get("prompt", question.get("messages"))
    if ours is None or not isinstance(theirs, list):
        said = "refuses" if ours is None else "tokenises"
        return f"chat template: this router {said} {probe!r:.120}, the engine does not"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    at = min(len(ours), len(theirs)) if at is None else at
    return (
        f"tokens of {probe!r:.120} differ at position {at}: the engine has {theirs[at : at + 4]}, "
        f"this router {ours[at : at + 4]}; compare tokenizer and chat template in "
        "model_path with what the engine loaded"
    )
