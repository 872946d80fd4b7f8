"""The records that cross a process boundary, and nothing else. All frozen, all versioned.

Router and cluster meet only here: a node describes itself to the index, a worker to the router,
the router's plan travels inside ``kv_transfer_params``, and the outcome comes back the same way.
"""

import reprlib
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Self

import msgpack
import msgspec

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace

PARAMS_KEY = "prefixfleet"
"""Our key inside vLLM's ``kv_transfer_params``, in requests and in responses."""

VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Rate = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    version: int = VERSION

    def encode(self) -> bytes:
        """MessagePack map of the fields; `decode` is its inverse."""
        packed: bytes = msgpack.packb(asdict(self), use_bin_type=True)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises `ConfigError` if ``data`` is not a record of this type and version."""
        try:
            values = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except (ValueError, msgpack.UnpackException) as error:
            raise ConfigError(f"{cls.__name__}: not MessagePack ({error})") from error
        return cls.from_map(values)

    @classmethod
    def from_map(cls, values: Any) -> Self:  # noqa: ANN401 - it arrives from outside, of any type
        """The record in a decoded map. Raises `ConfigError` on anything but its exact fields."""
        if not isinstance(values, dict) or values.get("version") != VERSION:
            raise ConfigError(
                f"{cls.__name__}: got {reprlib.repr(values):.200}, expected version {VERSION}"
            )
        expected = {f.name for f in fields(cls)}
        if set(values) != expected:
            raise ConfigError(
                f"{cls.__name__}: got fields {sorted(map(str, values))}, "
                f"expected {sorted(expected)}"
            )
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(_Record):
    """What a node daemon says of itself; renewed with its lease.

    ``contacts`` maps a link's name ("tcp", "ucx", "shm") to the address that peers connect to.
    ``stats`` is what `prefixfleet status` prints: tiers, blocks, links, counters; numbers only
    in its leaves besides names.
    """

    node: str
    host: str
    contacts: dict[str, str] = field(default_factory=dict)
    http: str = ""  # base URL of the daemon's own HTTP face: /health /metrics /prefetch
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord(_Record):
    """One engine that serves requests, as the router sees it.

    ``block_bytes`` is the size of one block on the wire, all shards. ``prefill_tokens_per_s``
    was measured by the worker itself when it started. ``state`` is "ready",
    "draining" (as an operator ordered, until that is taken back) or "leaving" (it ends soon, and
    maybe another takes its place). ``adapters`` are the LoRA adapters that the engine serves as
    models of their own: names to digests of their content, as its connector makes them; empty
    where it cannot be told.
    """

    worker: str
    node: str
    url: str  # base URL of the engine's OpenAI server, without /v1
    model: str  # served name
    model_path: str  # folder with tokenizer.json and the chat template
    namespace: dict[str, Any]  # fields of `Namespace`
    block_bytes: Count
    max_model_tokens: Count
    prefill_tokens_per_s: Rate
    state: str = "ready"
    rollout: Count = 0  # number of the update whose settings it was started with
    adapters: dict[str, str] = field(default_factory=dict)

    def identity(self) -> Namespace:
        """The namespace, checked. Raises `ConfigError`."""
        expected = {f.name for f in fields(Namespace)}
        if set(self.namespace) != expected:
            raise ConfigError(
                f"worker {self.worker}: namespace: got fields {sorted(map(str, self.namespace))}, "
                f"expected {sorted(expected)}"
            )
        try:
            return msgspec.convert(self.namespace, Namespace)
        except msgspec.ValidationError as error:
            raise ConfigError(f"worker {self.worker}: namespace: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWish(_Record):
    """What an operator wants of a running fleet; whoever runs its processes brings it about.

    ``draining`` names workers, nodes and hosts' addresses that shall get no new requests.
    ``nodes`` is how many nodes shall run engines (0: as many as were started). ``rollout`` counts
    updates: every worker that was started by an earlier one is to be replaced, one after the
    other, with ``environ`` over the settings of the fleet's start. ``failed`` says why an update
    went no further; empty while it may. ``undo`` is ``environ`` as it was before, to go back to.
    With ``most`` above 0 the fleet itself moves ``nodes`` between ``least`` and ``most``, so that
    a request waits about ``wait_s`` seconds for an engine.
    """

    draining: tuple[str, ...] = ()
    nodes: Count = 0
    least: Count = 0
    most: Count = 0
    wait_s: Seconds = 0.0
    rollout: Count = 0
    environ: dict[str, str] = field(default_factory=dict)
    undo: dict[str, str] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan(_Record):
    """The router's decision for one request, as the target node acts on it.

    ``source`` is empty when nothing is to be pulled. ``blocks`` leading blocks of the prompt's
    chain are wanted from it, at most. ``budget_s`` seconds are left for the pull, and for what
    the node itself reads from its disk, when the record is sent: clocks of two hosts do not
    compare, remaining seconds do. ``link`` names the link to use; empty leaves it to the target.
    """

    request: str
    source: str = ""
    source_epoch: Count = 0
    blocks: Count = 0
    budget_s: Seconds = 5.0
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(_Record):
    """What really happened to one request's prefix, in blocks; sent back by the engine.

    ``head`` is the hex hash of the prompt's first block (empty for a prompt shorter than a
    block): the router compares it with its own when it checks a worker for parity.
    """

    request: str
    prompt_blocks: Count
    engine_blocks: Count  # found in the engine's own cache
    local_blocks: Count  # loaded from this node's pool
    pulled_blocks: Count  # loaded after a pull
    pulled_bytes: Count
    pull_s: Seconds
    link: str = ""
    failure: str = ""  # reason label of a failed or shortened pull
    head: str = ""
