"""A server with the start, /health and completions of vLLM's, and deaths on demand."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(7)
        self._send(200, {})

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if os.environ["STANDIN"] == "refuses":
            self._send(400, {"error": "no prompts today"})
        else:
            self._send(200, {"usage": {"prompt_tokens": question["truncate_prompt_tokens"]}})

    def _send(self, status: int, values: object) -> None:
        body = json.dumps(values).encode()
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
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
