"""Fakes of an engine's HTTP face, on ports of their own. Not of our code: what a fake says about
prefixes it computes with the project's own tokenizer and hashes, like the connector in an engine.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from prefixfleet.router.body import read_body
from prefixfleet.router.prompt import (
    Prompt,
    prefix_chain,
    read_chat,
    read_completion,
    read_messages,
    read_responses,
)
from prefixfleet.router.tokens import Tokens, load_tokens
from prefixfleet.store.namespace import Namespace, hash_key
from prefixfleet.store.records import Outcome, WorkerRecord

SECRET = b"a secret of thirty-two bytes or so"
NAMESPACE = Namespace(
    model="fake",
    weights="0",
    dtype="float32",
    block_tokens=16,
    layout="none",
    engine="vllm",
    isa="any",
    tensor_parallel=1,
)

READERS = {
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_responses,
    "/v1/messages": read_messages,
}
UNPLANNED = (
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/detokenize",
    "/v1/messages/count_tokens",
)

Asked = dict[str, Any]
Behaviour = Callable[["FakeEngine", web.Request, Asked], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class FakeEngine:
    """One engine; ``behave`` answers prompts and may be exchanged while it runs."""

    name: str
    folder: Path
    node: str = ""
    model: str = "tiny"
    namespace: Namespace = NAMESPACE
    secret: bytes = SECRET
    prefill_tokens_per_s: float = 1_000.0
    plain: bool = False  # runs without our connector: no outcome, no plan
    tokenizes: bool = True  # has a route that tells the tokens of a text
    adapters: dict[str, str] = field(default_factory=dict)  # digests by name
    behave: Behaviour | None = None
    read: Behaviour | None = None  # answers who reads or cancels a stored response
    probe: Behaviour | None = None  # answers the one-token probes of the parity check
    tokens: Tokens = field(init=False)
    url: str = ""
    seen: list[Asked] = field(default_factory=list)  # bodies of prompts, parity probes left out
    seen_headers: list[dict[str, str]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)  # responses, by id
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None

    def __post_init__(self) -> None:
        self.tokens = load_tokens(self.folder)

    def record(self, **changes: Any) -> WorkerRecord:
        fields: dict[str, Any] = {
            "worker": self.name,
            "node": self.node or f"node-{self.name}",
            "url": self.url,
            "model": self.model,
            "model_path": str(self.folder),
            "namespace": asdict(NAMESPACE),
            "block_bytes": 1_000,
            "max_model_tokens": 100_000,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "adapters": self.adapters,
        }
        return WorkerRecord(**fields | changes)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator["FakeEngine"]:
        """Serve until the block ends; `stop` ends it earlier."""
        app = web.Application(client_max_size=64 << 20)
        if self.tokenizes:
            app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        for path in READERS:
            app.router.add_post(path, self._prompt)
        app.router.add_get("/v1/responses/{id:[^/]+}", self._read)
        app.router.add_post("/v1/responses/{id:[^/]+}/cancel", self._read)
        for path in UNPLANNED:
            app.router.add_post(path, self._echo)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True, backlog=2_048)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Close the port and every connection, as an engine that ends."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _tokenize(self, request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # vLLM takes no body of another type
            return web.json_response({"error": {"message": "Unsupported Media Type"}}, status=400)
        raw = await request.read()
        body = read_body(raw)
        read = read_completion if "prompt" in body.fields else read_chat
        prompt = read(body, self.tokens)
        if prompt.blind:
            return web.json_response({"error": {"message": prompt.blind}}, status=400)
        return web.json_response({"tokens": list(prompt.token_ids), "count": prompt.tokens})

    async def _models(self, request: web.Request) -> web.Response:
        """As vLLM 0.32 lists them."""
        cards = [{"id": self.model, "object": "model", "root": str(self.folder), "parent": None}]
        cards += [
            {"id": name, "object": "model", "root": f"/adapters/{name}", "parent": self.model}
            for name in self.adapters
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _read(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        self.seen_headers.append(dict(request.headers))
        self.raw.append(await request.read())
        try:
            return await (self.read or read_stored)(self, request, {})
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _echo(self, request: web.Request) -> web.Response:
        self.raw.append(await request.read())
        self.seen_headers.append(dict(request.headers))
        self.paths.append(request.path_qs)
        return web.json_response({"served_by": self.name})

    async def _prompt(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        asked = msgspec.json.decode(raw)
        # probes come without a plan
        if "kv_transfer_params" in asked or (self.plain and asked.get("max_tokens") != 1):
            self.seen.append(asked)
            self.raw.append(raw)
            self.seen_headers.append(dict(request.headers))
            self.paths.append(request.path_qs)
        elif asked.get("max_tokens") == 1:
            return await (self.probe or whole)(self, request, asked)
        try:
            return await (self.behave or answer)(self, request, asked)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def outcome(self, request: web.Request, asked: Asked) -> Outcome:
        """What the connector would report: everything that the plan wanted was pulled."""
        body = read_body(msgspec.json.encode(asked))
        prompt: Prompt = READERS[request.path](body, self.tokens)
        chain = prefix_chain(
            prompt,
            self.namespace.digest(self.secret),
            self.namespace.block_tokens,
            hash_key(self.secret),
            self.adapters.get(asked["model"], ""),
        )
        plan = (asked.get("kv_transfer_params") or {}).get("prefixfleet", {})
        return Outcome(
            request=plan.get("request", ""),
            prompt_blocks=len(chain),
            engine_blocks=0,
            local_blocks=0,
            pulled_blocks=plan.get("blocks", 0),
            pulled_bytes=0,
            pull_s=0.0,
            head=chain[0].hex() if chain else "",
        )


async def answer(engine: FakeEngine, request: web.Request, asked: Asked) -> web.StreamResponse:
    """What an engine does: a stream if asked for one, else a whole answer."""
    return await (streamed if asked.get("stream") else whole)(engine, request, asked)


async def whole(engine: FakeEngine, request: web.Request, asked: Asked) -> web.StreamResponse:
    """An answer in one piece, with the outcome."""
    body = {
        "id": "x",
        "model": engine.model,
        "choices": [{"index": 0, "text": engine.name, "message": {"content": engine.name}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    if not engine.plain:
        body["kv_transfer_params"] = {"prefixfleet": asdict(engine.outcome(request, asked))}
    return web.json_response(body)


def not_kept(response: str) -> dict[str, Any]:
    """What vLLM says of a response that it does not have."""
    told = f"Response with id '{response}' not found."
    error = {"message": told, "type": "invalid_request_error", "param": "response_id", "code": 404}
    return {"error": error}


def events_of(engine: "FakeEngine", response: str) -> list[bytes]:
    """The stream of a response, of more than one write, as vLLM begins and ends one."""
    event = b'event: %s\ndata: {"response":%s,"sequence_number":%d,"type":"%s"}\n\n'
    whole = msgspec.json.encode({"id": response, "object": "response", "model": engine.name})
    kinds = (b"response.created", b"response.in_progress", b"response.completed")
    return [event % (kind, whole, number, kind) for number, kind in enumerate(kinds)]


async def storing(engine: "FakeEngine", request: web.Request, asked: Asked) -> web.StreamResponse:
    """An engine that keeps its responses, unless they say not; each has the id that ``asked``
    names in ``metadata`` or one of its own."""
    previous = asked.get("previous_response_id")
    if previous is not None and previous not in engine.stored:
        return web.json_response(not_kept(previous), status=404)
    name = (asked.get("metadata") or {}).get("id") or f"resp_{engine.name}{len(engine.seen)}"
    if asked.get("store", True):
        engine.stored[name] = engine.name
    if asked.get("stream"):
        return await streaming(*events_of(engine, name))(engine, request, asked)
    text = '{"id":"resp_of_the_model"}'
    output = [{"id": "msg_1", "type": "message", "content": [{"text": text}]}]
    answer = {"id": name, "object": "response", "status": "completed", "output": output}
    return web.json_response(answer | {"served_by": engine.name})


async def read_stored(
    engine: "FakeEngine", request: web.Request, asked: Asked
) -> web.StreamResponse:
    """A stored response, as vLLM gives it: whole, its events again, or cancelled."""
    name = request.match_info["id"]
    if name not in engine.stored:
        return web.json_response(not_kept(name), status=404)
    if request.query.get("stream") == "true":
        return await streaming(*events_of(engine, name))(engine, request, asked)
    status = "cancelled" if request.method == "POST" else "completed"
    return web.json_response({"id": name, "status": status, "served_by": engine.name})


EVENTS = (
    *(
        b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % word.encode()
        for word in ("Straße", " 世界", " 🙂", "")
    ),
    b"data: [DONE]\n\n",
)


def streaming(*chunks: bytes, then: Callable[[], Awaitable[None]] | None = None) -> Behaviour:
    """Behaviour that writes ``chunks``, each in a write of its own, then waits for ``then``."""

    async def behave(engine: FakeEngine, request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)
        if then:
            await then()
        await response.write_eof()
        return response

    return behave


streamed = streaming(*EVENTS)


async def for_ever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(talk: Talk) -> AsyncIterator[str]:
    """A TCP server that speaks ``talk``; gives its URL. For answers that no HTTP library sends."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if task := asyncio.current_task():
            tasks.add(task)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one HTTP request with a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        ),
        0,
    )
    return head, await reader.readexactly(length)
