"""A very fast fake engine in a process of its own: fixed answers from a raw protocol.

``python bench_upstream.py MODEL_FOLDER`` prints its URL and serves until it is killed. A prompt
gets one JSON, or with ``"stream":true`` a stream of 33 events, one a turn of the loop, or so many
ms apart as the body says in ``"user":"pace_MS"``. It answers the probes of every router that is
measured, ours truly.
"""

import asyncio
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from prefixfleet.router.body import read_body
from prefixfleet.router.prompt import prefix_chain, read_chat, read_completion
from prefixfleet.router.tokens import Tokens, load_tokens
from prefixfleet.store.namespace import Namespace, hash_key
from prefixfleet.store.records import Outcome

SECRET = b"a secret of thirty-two bytes or so"
NAMESPACE = Namespace(
    model="bench",
    weights="0",
    dtype="float32",
    block_tokens=16,
    layout="none",
    engine="vllm",
    isa="any",
    tensor_parallel=1,
)
_PACE = re.compile(rb'"user":"pace_(\d+)"')
EVENTS = [
    b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":" word%02d"}]}\n\n'
    % i
    for i in range(32)
] + [b"data: [DONE]\n\n"]
_JSON = (
    b'{"id":"c","object":"text_completion","model":"tiny","choices":[{"index":0,"text":"%b",'
    b'"finish_reason":"length"}],"usage":{"prompt_tokens":300,"completion_tokens":32}}'
) % (b" word" * 32)


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_FRAMES = [b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS]
_END = b"0\r\n\r\n"
PLAIN = _answer(_JSON)
FIXED = {
    b"/health": _answer(b"{}"),
    b"/v1/models": _answer(b'{"object":"list","data":[{"id":"tiny","object":"model"}]}'),
    b"/get_model_info": _answer(b'{"model_path":"tiny","is_generation":true}'),
    b"/get_server_info": _answer(b'{"model_path":"tiny","served_model_name":"tiny"}'),
    b"/server_info": _answer(b'{"model_path":"tiny","served_model_name":"tiny"}'),
    b"/model_info": _answer(b'{"model_path":"tiny","is_generation":true}'),
}


class _Upstream(asyncio.Protocol):
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            if head.startswith(b"PRI "):  # somebody tries HTTP/2 without asking
                return self._transport.close()
            whole = end + 4 + _length_of(head)
            if len(self._buffer) < whole:
                return None
            body, self._buffer = self._buffer[end + 4 : whole], self._buffer[whole:]
            self._serve(head.split(b" ", 2)[1].partition(b"?")[0], body)
        return None

    def _serve(self, path: bytes, body: bytes) -> None:
        if fixed := FIXED.get(path):
            self._transport.write(fixed)
        elif path == b"/tokenize" or (b'"max_tokens":1}' in body or b'"cache_salt"' in body):
            self._transport.write(_answer(self._probe(path, body)))
        elif b'"stream":true' not in body:
            self._transport.write(PLAIN)
        else:
            pace = _PACE.search(body)
            self._transport.write(_HEAD)
            self._stream(0, int(pace[1]) / 1_000 if pace else 0.0)

    def _stream(self, event: int, pace_s: float) -> None:
        """Each event in a write and a turn of the loop of its own, as an engine sends them."""
        if self._transport.is_closing():
            return  # the client of this stream has left
        last = event == len(_FRAMES) - 1
        self._transport.write(_FRAMES[event] + (_END if last else b""))
        if not last:
            asyncio.get_running_loop().call_later(pace_s, self._stream, event + 1, pace_s)

    def _probe(self, path: bytes, raw: bytes) -> bytes:
        body = read_body(raw)
        read = read_chat if "messages" in body.fields else read_completion
        prompt = read(body, self._tokens)
        if path == b"/tokenize":
            return msgspec.json.encode({"tokens": list(prompt.token_ids)})
        key = hash_key(SECRET)
        chain = prefix_chain(prompt, NAMESPACE.digest(SECRET), NAMESPACE.block_tokens, key)
        outcome = Outcome(
            request="",
            prompt_blocks=len(chain),
            engine_blocks=0,
            local_blocks=0,
            pulled_blocks=0,
            pulled_bytes=0,
            pull_s=0.0,
            head=chain[0].hex(),
        )
        return msgspec.json.encode({"kv_transfer_params": {"prefixfleet": asdict(outcome)}})


def _length_of(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def _main(folder: Path) -> None:
    tokens = load_tokens(folder)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Upstream(tokens), "127.0.0.1", 0, backlog=4_096)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1])))
