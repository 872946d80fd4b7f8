"""``/admin/pins``: an operator's wish that the prefix of a prompt stays on the nodes that hold it.

POST takes a chat's or completion's body (``model``, and ``messages`` or ``prompt``) with ``ttl_s``,
optionally ``priority``, and ``key``, the name of the API key whose tenant's cache is meant. DELETE
takes the same and ends the wish. Where nobody holds the prefix yet, the nodes of all workers of the
model are told: a wish covers what comes later. Say ``"add_generation_prompt": false`` for a chat
that goes on. The answer has an entry for each namespace of the model on each of its ``nodes``: they
cut the prompt into other blocks, and a node keeps those of one and perhaps not of another.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from prefixfleet.router.body import Body, read_body
from prefixfleet.router.core import Router
from prefixfleet.router.dispatch import Chains
from prefixfleet.router.errors import BadRequest, NotFound
from prefixfleet.router.keys import ANYBODY, Key
from prefixfleet.router.prompt import Prompt, read_chat, read_completion
from prefixfleet.router.worker import Worker
from prefixfleet.store.keep import Keep
from prefixfleet.store.retention import MAX_PRIORITY, MAX_TTL_S


class _Wish(msgspec.Struct):
    model: str
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = 0
    key: str | None = None


class _Kept(msgspec.Struct, omit_defaults=True):
    """`Told` of one namespace, by the digest that the node's own status has."""

    namespace: str
    blocks: int
    covered: int = 0
    quota: int = 0
    error: str = ""


async def pin(router: Router, raw: bytes, *, ends: bool) -> dict[str, Any]:
    """What each node says. Raises `Refusal`."""
    body, wish = _read(raw)
    if wish.ttl_s is None and not ends:
        raise BadRequest(f"ttl_s is missing: seconds, at most {MAX_TTL_S:.0f}", param="ttl_s")
    workers = [w for w in router.roster.openings.ready(wish.model) if not w.static]
    if not workers:
        raise BadRequest("plain engines have no node that could keep a prefix", param="model")
    prompt, chains = await asyncio.get_running_loop().run_in_executor(
        router.threads, lambda: _understood(router, body, _key(router, wish.key), workers)
    )
    told: dict[str, list[_Kept]] = defaultdict(list)
    for kind, chain in chains.items():
        alike = [w for w in workers if w.kind == kind]
        nodes = {w.record.node for w in alike}
        name = alike[0].namespace.hex()
        if not chain:
            for node in sorted(nodes):
                told[node].append(_Kept(name, 0, error=_why_nothing(prompt, alike)))
            continue
        holders = nodes & router.view.leading(chain).keys()
        keep = Keep(
            namespace=alike[0].namespace,
            chain=tuple(chain),
            ttl_s=0.0 if ends else wish.ttl_s or 0.0,
            priority=wish.priority,
        )
        asked = sorted(nodes if ends else holders or nodes)
        for node, said in (await router.wishes.ask(asked, keep)).items():
            told[node].append(_Kept(name, len(chain), said.covered, said.quota, said.error))
    blocks = max(map(len, chains.values()))
    return {"tokens": prompt.tokens, "blocks": blocks, "nodes": told}


def _read(raw: bytes) -> tuple[Body, _Wish]:
    body = read_body(raw)
    try:
        return body, msgspec.json.decode(raw, type=_Wish)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is no wish: {error}") from None


def _key(router: Router, name: str | None) -> Key:
    if name is None:
        return ANYBODY
    key = router.files.keys.named(name)
    if key is None:
        raise NotFound(f"there is no API key named {name!r:.80}")
    return key


def _understood(
    router: Router, body: Body, key: Key, workers: Sequence[Worker]
) -> tuple[Prompt, Chains]:
    read = read_chat if "messages" in body.fields else read_completion
    prompt = read(body, workers[0].tokens, key.tenant)
    prompt = msgspec.structs.replace(prompt, salt=router.salt_of(key, prompt.salt))
    chains = router.dispatcher.chains(prompt, workers)
    if not any(chains.values()):
        raise BadRequest(f"there is nothing to keep: {_why_nothing(prompt, workers)}")
    return prompt, chains


def _why_nothing(prompt: Prompt, workers: Sequence[Worker]) -> str:
    """Why the prompt has no chain in any of ``workers``."""
    unknown = all(worker.lora is None for worker in workers)
    short = "what the adapter is cannot be told" if unknown else "it is shorter than a block"
    return prompt.blind or short
