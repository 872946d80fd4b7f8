"""Every parser of bytes from outside as one function of bytes: property tests, the corpus and the
coverage-guided fuzzer all feed the same targets.

A target either takes the bytes or raises one of its refusals. Anything else is a crash.
"""

import asyncio
import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import msgpack
import msgspec
from chats import CHATML, HEADERS, PARTS, write_model

from prefixfleet.cluster.engine_channel import encode_frame, read_frame, split_hashes
from prefixfleet.cluster.engine_questions import Hello, Prepare, Report, Reserve, parse_question
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.router import prompt
from prefixfleet.router.body import read_body, with_fields
from prefixfleet.router.errors import Refusal
from prefixfleet.router.framing import BadFraming, framing_of, parse_head
from prefixfleet.router.inflate import inflate
from prefixfleet.router.keys import Keys
from prefixfleet.router.orders import decoded
from prefixfleet.router.outcome import read_outcome
from prefixfleet.router.settings import RouterSettings
from prefixfleet.router.tokens import Tokens, load_tokens
from prefixfleet.router.traces import parse_trace
from prefixfleet.store.adapters import adapters_in
from prefixfleet.store.engine_events import decode_batch
from prefixfleet.store.engine_mirror import EngineMirror
from prefixfleet.store.errors import ConfigError, CorruptBlock, PeerRefused, ProtocolError
from prefixfleet.store.event_slices import slices
from prefixfleet.store.namespace import Namespace
from prefixfleet.store.prefetch import Prefetch, encode_prefetch, open_prefetch, sign
from prefixfleet.store.records import FleetWish, NodeRecord, Outcome, PullPlan, WorkerRecord
from prefixfleet.store.settings import FleetSettings
from prefixfleet.store.slot import SlotLayout, seal, verify
from prefixfleet.store.trtllm_events import decode_poll
from prefixfleet.store.trtllm_mirror import PolledMirror
from prefixfleet.transfer import messages, wire
from prefixfleet.transfer.link import Range

KEY = b"k" * 32
NAMESPACE = Namespace(
    model="m",
    weights="w",
    dtype="float32",
    block_tokens=32,
    layout="l",
    engine="vllm",
    isa="any",
    tensor_parallel=1,
)
LAYOUT = SlotLayout(payload_bytes=200)


@dataclass(frozen=True)
class Target:
    """``feed`` takes any bytes; ``seeds`` are right ones to start from."""

    name: str
    feed: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]

    def try_bytes(self, data: bytes) -> bool:
        """Whether the bytes were taken. Raises whatever is no refusal."""
        try:
            self.feed(data)
        except self.refusals:
            return False
        return True


async def _frames(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    while not reader.at_eof():
        question = parse_question(await read_frame(reader))
        if isinstance(question, Hello):
            question.identity()
            question.layout()
        elif isinstance(question, Prepare):
            split_hashes(question.chain)
            question.pull_plan()
        elif isinstance(question, Reserve):
            question.parent_hash()
            split_hashes(question.hashes)
        elif isinstance(question, Report):
            question.record()


def _engine_frames(data: bytes) -> None:
    asyncio.run(_frames(data))


def _wire_frame(data: bytes) -> None:
    header = wire.decode_header(data[: wire.HEADER.size].ljust(wire.HEADER.size, b"\0"))
    body = data[wire.HEADER.size :]
    wire.check_body(header, body)
    for kind in (wire.Hello, wire.Challenge, wire.Proof, wire.Welcome, wire.Refusal):
        try:
            wire.unpack(body, kind)
        except ProtocolError:
            continue


def _peer_question(data: bytes) -> None:
    asked: messages.Question = wire.unpack(data, messages.Question)
    if isinstance(asked, messages.Lease):
        messages.split_hashes(asked.hashes)


def _ranges(data: bytes) -> None:
    total = sum(part.length for part in wire.decode_ranges(data, 1 << 20))
    assert total <= wire.MAX_DATA_BYTES


def _push(data: bytes) -> None:
    tag, ranges = wire.decode_push(data, 1 << 20)
    assert sum(part.length for part in ranges) <= wire.MAX_DATA_BYTES
    assert tag + len(ranges) <= 1 << 64


def _prefetch(data: bytes) -> None:
    open_prefetch(data, sign(data, KEY), KEY)


def _signature(data: bytes) -> None:
    open_prefetch(b"body", data.decode("utf-8", "surrogateescape"), KEY)


def _root(*scope: str) -> bytes:
    return "/".join(scope).encode()[:16].ljust(16)


def _engine_events(data: bytes) -> None:
    mirror = EngineMirror(_root, 2, KEY, _root)
    for piece in slices(decode_batch([b"topic", b"\0" * 8, data]).events):
        mirror.more(piece)


def _polled_events(data: bytes) -> None:
    polled = PolledMirror(EngineMirror(lambda salt: salt.encode()[:16].ljust(16), 2, KEY))
    list(polled.take(decode_poll(data, 2)))


def _trace(data: bytes) -> None:
    list(parse_trace(io.BytesIO(data), name="fuzz", as_blocks=bool(len(data) % 2)))


def _environment(data: bytes) -> None:
    environ = {}
    for line in data.decode("utf-8", "replace").split("\n"):
        name, _, value = line.partition("=")
        environ["PREFIXFLEET_" + name] = value.replace("\0", "")
    for section in (FleetSettings, NodeSettings, RouterSettings):
        try:
            section.read(environ)
        except ConfigError:
            continue


def _http_answer(data: bytes) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    framing = framing_of(parse_head(head))
    for start in range(0, len(body), 7):
        if framing.done:
            break
        framing.feed(body[start : start + 7])


def _inflate(data: bytes) -> None:
    for name in ("gzip", "deflate"):
        with contextlib.suppress(Refusal):
            assert len(inflate(data, name, 10_000)) <= 10_000


@cache
def _models() -> tuple[Tokens, ...]:
    """One model a family of chat templates."""
    found = []
    for template in (CHATML, HEADERS, PARTS):
        with tempfile.TemporaryDirectory(prefix="pf-fuzz-") as folder:
            found.append(load_tokens(write_model(Path(folder), template)))
    return tuple(found)


def _body(data: bytes) -> None:
    body = read_body(data)
    changed = with_fields(body, {"kv_transfer_params": {"prefixfleet": {}}})
    with contextlib.suppress(UnicodeDecodeError):  # bytes of other fields pass on as they are
        assert json.loads(changed)["kv_transfer_params"] == {"prefixfleet": {}}
    for read in (
        prompt.read_chat,
        prompt.read_completion,
        prompt.read_responses,
        prompt.read_messages,
    ):
        for tokens in _models():
            found = read(body, tokens)
            prompt.prefix_chain(found, b"n" * 16, 16, KEY)


def _worker_order(data: bytes) -> None:
    decoded({"a": data})


def _keys_file(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="pf-fuzz-") as file:
        file.write(data)
        file.flush()
        keys = Keys(Path(file.name))
        keys.load()
        keys.reload_if_changed()


def _slot(data: bytes) -> None:
    slot = memoryview(bytearray(data[: LAYOUT.slot_bytes].ljust(LAYOUT.slot_bytes, b"\0")))
    verify(slot, LAYOUT, b"n" * 16, b"h" * 16)


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _questions() -> bytes:
    plan = asdict(PullPlan(request="r", source="b", source_epoch=1, blocks=2))
    outcome = asdict(_OUTCOME)
    asked: list[dict[str, object]] = [
        {"op": "hello", "version": 1, "engine": "e", "role": "worker", "rank": 0,
         "namespace": asdict(NAMESPACE), "payload_bytes": 8000, "shards": 1},
        {"op": "prepare", "request": "r", "chain": b"h" * 32, "plan": plan, "budget_s": 5.0},
        {"op": "reserve", "parent": b"", "hashes": b"h" * 16, "rank": 0},
        {"op": "commit", "hashes": b"h" * 16, "rank": 0},
        {"op": "discard", "hashes": b"h" * 16},
        {"op": "outcome", "outcome": outcome},
        {"op": "release", "request": "r"},
    ]  # fmt: skip
    return b"".join(encode_frame({"id": i, **q}) for i, q in enumerate(asked))


def _sealed() -> bytes:
    slot = memoryview(bytearray(LAYOUT.slot_bytes))
    seal(slot, LAYOUT, b"n" * 16, b"h" * 16)
    return bytes(slot)


def _framed(message: msgspec.Struct, kind: wire.Kind) -> bytes:
    body = wire.pack(message)
    return wire.frame_header(kind, body) + body


_OUTCOME = Outcome(
    request="r",
    prompt_blocks=3,
    engine_blocks=1,
    local_blocks=1,
    pulled_blocks=1,
    pulled_bytes=10,
    pull_s=0.1,
)
_NODE = NodeRecord(node="a", host="h", contacts={"tcp": "tcp://127.0.0.1:1"}, http="http://h:1")
_WORKER = WorkerRecord(
    worker="w",
    node="a",
    url="http://127.0.0.1:1",
    model="m",
    model_path="/m",
    namespace=asdict(NAMESPACE),
    block_bytes=1,
    max_model_tokens=1,
    prefill_tokens_per_s=1.0,
)
_LEASE = messages.Lease(b"n" * 16, 1, 200, 1, b"h" * 32, 5.0)
_MODELS = {
    "object": "list",
    "data": [
        {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 2048},
        {"id": "sql", "object": "model", "root": "/adapters/sql", "parent": "base"},
    ],
}
_POLLED = [
    {"event_id": 0, "window_size": 8, "data": {"type": "created"}},
    {
        "event_id": 1,
        "window_size": 8,
        "attention_dp_rank": 0,
        "data": {
            "type": "stored",
            "parent_hash": None,
            "blocks": [
                {"block_hash": 2**63, "tokens": [{"token_id": 1}, {"token_id": 2}]},
                {"block_hash": "ab", "tokens": [{"token_id": 3, "token_extra_id": 0}]},
            ],
        },
    },
    {"event_id": 2, "window_size": 8, "data": {"type": "removed", "block_hashes": [2**63]}},
]
_EVENT = {
    "type": "BlockStored", "block_hashes": [1, b"x" * 32], "parent_block_hash": None,
    "token_ids": [1, 2], "block_size": 1, "medium": "GPU",
}  # fmt: skip
_CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Straße"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "stream": True,
    "n": 2,
    "cache_salt": "s",
}
_TEXT = {"model": "tiny", "prompt": ["a", [1, 2]], "max_tokens": 3, "kv_transfer_params": {"a": 1}}
_KEYS = {"keys": [{"name": "a", "sha256": "0" * 64, "tenant": "t", "requests_per_s": 2.5}]}
_WISH = FleetWish(draining=("n0",), nodes=2, environ={"A": "b"})
_ORDER = b'{"entry":{"name":"a","url":"http://h:1","model":"m","model_path":"/m"}}'
_LINES = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    b'{"timestamp": "2026-01-02T03:04:05", "body": {"messages": [{"role": "user", '
    b'"content": "hi"}], "max_tokens": 4}}'
)

TARGETS = {
    target.name: target
    for target in (
        Target(
            "engine-frames",
            _engine_frames,
            (ProtocolError, ConfigError, asyncio.IncompleteReadError),
            (_questions(),),
        ),
        Target(
            "wire-frame",
            _wire_frame,
            (ProtocolError, PeerRefused),
            (
                _framed(wire.Hello("a", "tcp", b"n" * 32), wire.Kind.HELLO),
                _framed(wire.Welcome(b"p" * 32, b"more"), wire.Kind.WELCOME),
                _framed(wire.Reached("tcp/eth0"), wire.Kind.ANSWER),
            ),
        ),
        Target(
            "peer-question",
            _peer_question,
            (ProtocolError,),
            (wire.pack(_LEASE), wire.pack(messages.Release(3, b"h" * 16))),
        ),
        Target(
            "peer-answer",
            lambda data: messages.decode_answer(data, "a"),
            (ProtocolError, PeerRefused, *messages._ERRORS.values()),
            (wire.pack(messages.Leased(1, [2, 3], 1.0)), wire.pack(messages.No("epoch", "x"))),
        ),
        Target("ranges", _ranges, (ProtocolError,), (wire.encode_ranges([Range(0, 4096)]),)),
        Target("push", _push, (ProtocolError,), (wire.encode_push(1, [Range(0, 4096)]),)),
        Target("node-record", NodeRecord.decode, (ConfigError,), (_NODE.encode(),)),
        Target("worker-record", WorkerRecord.decode, (ConfigError,), (_WORKER.encode(),)),
        Target("fleet-wish", FleetWish.decode, (ConfigError,), (_WISH.encode(),)),
        Target("worker-order", _worker_order, (), (b'{"state":"draining"}', _ORDER)),
        Target("pull-plan", PullPlan.decode, (ConfigError,), (PullPlan(request="r").encode(),)),
        Target("outcome", Outcome.decode, (ConfigError,), (_OUTCOME.encode(),)),
        Target(
            "prefetch",
            _prefetch,
            (ProtocolError,),
            (
                encode_prefetch(
                    Prefetch(plan=PullPlan(request="r"), namespace=b"n" * 16, chain=(b"h" * 16,))
                ),
            ),
        ),
        Target("signature", _signature, (PeerRefused,), (sign(b"bodY", KEY).encode(),)),
        Target(
            "engine-events",
            _engine_events,
            (ProtocolError,),
            (
                _pack([1.0, [_EVENT, {"type": "AllBlocksCleared"}], 0]),
                _pack([1.0, [["BlockRemoved", [1, 2], "GPU"]]]),
            ),
        ),
        Target("polled-events", _polled_events, (ProtocolError,), (json.dumps(_POLLED).encode(),)),
        Target("model-list", adapters_in, (ProtocolError,), (json.dumps(_MODELS).encode(),)),
        Target("trace", _trace, (ConfigError,), (_LINES,)),
        Target(
            "environment",
            _environment,
            (),
            (b"FLEET=a\nREDIS_URL=redis://h\nNODE_POOL_BYTES=1\nROUTER_PORT=1\nROUTER_X=2",),
        ),
        Target(
            "http-answer",
            _http_answer,
            (BadFraming,),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
                b"HTTP/1.0 200\r\nContent-Length: 3\r\n\r\nabc",
            ),
        ),
        Target("inflate", _inflate, (), (b"\x1f\x8b\x08\x00", b"x\x9cKL\x04\x00\x01'\x00\xc3")),
        Target("body", _body, (Refusal,), (json.dumps(_CHAT).encode(), json.dumps(_TEXT).encode())),
        Target(
            "engine-outcome",
            read_outcome,
            (),
            (json.dumps({"kv_transfer_params": {"prefixfleet": asdict(_OUTCOME)}}).encode(),),
        ),
        Target("keys-file", _keys_file, (ConfigError,), (json.dumps(_KEYS).encode(),)),
        Target("slot", _slot, (CorruptBlock,), (_sealed(),)),
    )
}
