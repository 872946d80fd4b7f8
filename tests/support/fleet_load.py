"""Load on a fleet from one of its hosts, as a process: fleet_load.py URL FILE RATE SEED.

Asks ``RATE`` times a second, open loop: questions about a few documents, every fourth as a stream.
Each end of a request is a line of JSON in FILE, and so is each change of what the router says of
workers and nodes. Times are the machine's monotonic seconds, the same on all namespace hosts.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import aiohttp

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 12, 1024, 24
STREAM_EVERY, STREAMED_TOKENS = 4, 30
LIMIT_S = 30.0
WATCH_S = 0.1


class Load:
    """Owned by its event loop; `run` until cancelled."""

    def __init__(self, url: str, out: TextIO, rate: float, seed: int) -> None:
        self._url, self._out, self._rate = url, out, rate
        self._dice = random.Random(seed)
        self._documents = [
            self._dice.choices(range(1, 500), k=DOCUMENT_TOKENS) for _ in range(DOCUMENTS)
        ]

    async def run(self) -> None:
        """Ask and watch."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            group.create_task(self._watch(session))
            number = 0
            while True:
                number += 1
                group.create_task(self._ask(session, stream=number % STREAM_EVERY == 0))
                await asyncio.sleep(1 / self._rate)

    async def _ask(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        question = self._dice.choices(range(1, 500), k=QUESTION_TOKENS)
        body: dict[str, Any] = {
            "model": "small",
            "prompt": self._dice.choice(self._documents) + question,
        }
        body |= {"max_tokens": STREAMED_TOKENS if stream else 1, "stream": stream}
        ended: dict[str, Any] = {"began": time.monotonic(), "stream": stream, "node": ""}
        try:
            async with asyncio.timeout(LIMIT_S):
                ended["how"] = await self._answered(session, body, ended)
        except TimeoutError:
            ended["how"] = "hung"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            ended["how"] = f"{type(error).__name__}: {error}"
        self._say(ended | {"ended": time.monotonic()})

    async def _answered(
        self, session: aiohttp.ClientSession, body: dict[str, Any], ended: dict[str, Any]
    ) -> str:
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            ended["node"] = response.headers.get("x-prefixfleet-node", "")
            ended["open"] = response.status == 200
            text = await response.text()
        if response.status != 200:
            return f"status {response.status}: {text[:200]}"
        if body["stream"]:
            complete = text.rstrip().endswith("data: [DONE]") and '"error"' not in text
            return "ok" if complete else f"broken stream: {text[-200:]}"
        outcome = json.loads(text)["kv_transfer_params"]["prefixfleet"]
        ended["blocks"] = outcome["prompt_blocks"]
        ended["pulled"] = outcome["pulled_blocks"]
        ended["reused"] = outcome["local_blocks"] + outcome["pulled_blocks"]
        return "ok"

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        last: dict[str, Any] = {}
        seen: dict[str, Any]
        while True:
            try:
                async with session.get(f"{self._url}/status") as response:
                    status = await response.json()
                seen = {
                    "workers": {w["worker"]: w["state"] for w in status["workers"]},
                    "nodes": {
                        n["node"]: [n["epoch"] or 0, n["lease"] != "held"] for n in status["nodes"]
                    },
                }
            except (aiohttp.ClientError, OSError) as error:
                seen = {"router": repr(error)}
            if seen != last:
                last = seen
                self._say(seen | {"at": time.monotonic()})
            await asyncio.sleep(WATCH_S)

    def _say(self, values: dict[str, Any]) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()


def main() -> None:
    with Path(sys.argv[2]).open("w") as out:
        asyncio.run(Load(sys.argv[1], out, float(sys.argv[3]), int(sys.argv[4])).run())


if __name__ == "__main__":
    main()
