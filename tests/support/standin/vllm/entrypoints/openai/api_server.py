"""A server with the start, /health, /metrics and completions of vLLM's, and deaths on demand.

A request to /hold is in flight until there was one to /let-go. With STANDIN=adapts it serves the
folder of its --model as an adapter too, as long as that has weights.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0.0
"""
held = threading.Event()
let_go = threading.Event()


def adapters() -> list[dict[str, str]]:
    folder = Path(sys.argv[sys.argv.index("--model") + 1])
    loaded = os.environ["STANDIN"] == "adapts" and any(folder.glob("*.safetensors"))
    return [{"id": "an adapter", "root": str(folder), "parent": "base"}] if loaded else []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(7)
        if self.path == "/hold":
            held.set()
            let_go.wait(60)
            held.clear()
        if self.path == "/let-go":
            let_go.set()
        if self.path == "/v1/models":
            self._send(200, {"data": adapters()})
            return
        self._send(200, METRICS.format(running=float(held.is_set())))

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if os.environ["STANDIN"] == "refuses":
            self._send(400, {"error": "no prompts today"})
        else:
            count = question.get("truncate_prompt_tokens", 1)
            self._send(200, {"usage": {"prompt_tokens": count}})

    def _send(self, status: int, values: object) -> None:
        body = values.encode() if isinstance(values, str) else json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    sys.stderr.write(f"standing in, {os.environ['STANDIN']}\n")
    if os.environ["STANDIN"] == "breaks":
        sys.exit("no such weights")
    if os.environ["STANDIN"] == "raises":
        ours = "(core) prefixfleet.store.errors.ConfigError: prefixfleet: not this engine"
        sys.exit("\n".join([ours, *["RuntimeError: see root cause above"] * 300]))
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
