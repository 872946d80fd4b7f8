"""One vLLM request as the connector sees it: its prefix chain, its plan, and what became of it.

Must not know the daemon or the engine's scheduler.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from prefixfleet.cluster.connector_lookup import Found
from prefixfleet.cluster.engine_client import Welcome
from prefixfleet.store.chain import BlockHash, extend_chain
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Scope, chain_root
from prefixfleet.store.records import PARAMS_KEY, Outcome, PullPlan

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

AdapterDigest = Callable[["LoRARequest"], str]
"""Digest of an adapter's content. Raises `ConfigError` if it cannot be told."""


@dataclass(slots=True)
class Prefix:
    """Owned by the scheduler half, from the request's arrival to its end."""

    request: "Request"
    scope: Scope
    plan: PullPlan | None
    block_tokens: int
    adapter_digest: AdapterDigest
    chain: list[BlockHash] = field(default_factory=list)  # of the full blocks known so far
    saved: int = 0  # leading blocks that are in the pool or on their way
    first: int = 0  # leading blocks that the engine itself had at the latest match
    attempt: int = 0  # preemptions of the request at its latest lookup
    load_failed: bool = False
    misnamed: bool = False  # its adapter is not what it was at the request's arrival
    engine_blocks: int = 0  # as `first`, of the request's first start
    loaded_local: int = 0
    loaded_pulled: int = 0
    found: Found = field(default_factory=Found)
    _made_for: Welcome | None = None

    @property
    def name(self) -> str:
        """The request's name in plans and outcomes: the router's if it sent a plan."""
        request_id: str = self.request.request_id
        return self.plan.request if self.plan else request_id

    def extend(self, welcome: Welcome) -> None:
        """Hash the blocks that became full since the last call; all for another daemon's life."""
        if self._made_for != welcome:
            self._made_for = welcome
            self.chain.clear()
            self.saved = 0
        first, full = len(self.chain), self.request.num_tokens // self.block_tokens
        if full <= first:
            return
        root = chain_root(welcome.namespace_digest, self.scope, welcome.hash_key)
        self.chain += extend_chain(
            self.chain[-1] if self.chain else root,
            self.request.all_token_ids[first * self.block_tokens : full * self.block_tokens],
            self.block_tokens,
            welcome.hash_key,
            dict(self._extras(first, full)),
        )

    def is_named_rightly(self) -> bool:
        """Whether its adapter is still the one in its scope; once it is not, it stays so.

        The engine may read an adapter's files only when it begins to compute.
        """
        if self.scope.lora and not self.misnamed:
            self.misnamed = _lora(self.request, self.adapter_digest) != self.scope.lora
        return not self.misnamed

    def loadable(self) -> list[BlockHash]:
        """Leading blocks that may come from the pool: one token at least is left to compute."""
        return self.chain[: (self.request.num_tokens - 1) // self.block_tokens]

    def parent_of(self, position: int) -> BlockHash:
        """Hash before the block at ``position``; empty at the root."""
        return self.chain[position - 1] if position else b""

    def note_match(self, first: int) -> None:
        """The engine itself has ``first`` blocks."""
        self.first = first
        if self.request.num_preemptions == 0:
            self.engine_blocks = first

    def note_found(self, found: Found) -> None:
        """The lookup's end; the first one is the outcome's."""
        if self.request.num_preemptions == 0:
            self.found = found

    def note_loaded(self, good: int, wanted: int) -> None:
        """``good`` of the ``wanted`` blocks after the engine's own came from the pool."""
        if self.request.num_preemptions == 0:
            self.loaded_local = max(0, min(self.first + good, self.found.local) - self.first)
            self.loaded_pulled = good - self.loaded_local
        # looked up again a failed load would fail again, and the engine would ask for ever
        self.load_failed = good < wanted
        self.saved = 0 if self.load_failed else self.first + good

    def outcome(self) -> Outcome:
        """What happened to the prompt's prefix."""
        found = self.found
        prompt_blocks = self.request.num_prompt_tokens // self.block_tokens
        return Outcome(
            request=self.name,
            prompt_blocks=prompt_blocks,
            engine_blocks=self.engine_blocks,
            local_blocks=self.loaded_local,
            pulled_blocks=self.loaded_pulled,
            pulled_bytes=found.pulled_bytes,
            pull_s=found.pull_s,
            link=found.link,
            failure=found.failure,
            head=self.chain[0].hex() if prompt_blocks and self.chain else "",
        )

    def _extras(self, first: int, full: int) -> Iterator[tuple[int, bytes]]:
        """For each block that images overlap: which, and where in the block they lie."""
        for position in range(full - first):
            start = (first + position) * self.block_tokens
            inside = [
                (feature.modality, feature.identifier, place.offset - start, place.length)
                for feature in self.request.mm_features
                if (place := feature.mm_position).offset < start + self.block_tokens
                and place.offset + place.length > start
            ]
            if inside:
                yield position, msgpack.packb(inside, use_bin_type=True)


def read_prefix(
    request: "Request", block_tokens: int, adapter_digest: AdapterDigest
) -> Prefix | None:
    """The request's prefix; None if its KV is not a function of its token ids, scope and images."""
    if request.prompt_embeds is not None or request.resumable:
        return None
    if (lora := _lora(request, adapter_digest)) is None:
        return None
    scope = Scope(lora=lora, salt=request.cache_salt or "")
    return Prefix(request, scope, read_plan(request), block_tokens, adapter_digest)


def _lora(request: "Request", adapter_digest: AdapterDigest) -> str | None:
    """Of its scope; None if nobody can tell, which is logged."""
    try:
        return adapter_digest(request.lora_request) if request.lora_request else ""
    except ConfigError as error:
        log.warning("prefixfleet: request %s is not cached: %s", request.request_id, error)
        return None


def read_plan(request: "Request") -> PullPlan | None:
    """The router's plan, None without one; one that cannot be read is ignored, and logged."""
    params: Any = request.kv_transfer_params
    if not isinstance(params, dict) or PARAMS_KEY not in params:
        return None
    try:
        return PullPlan.from_map(params[PARAMS_KEY])
    except ConfigError as error:
        log.warning("prefixfleet: plan of request %s ignored: %s", request.request_id, error)
        return None
