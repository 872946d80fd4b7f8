"""What a worker asks its engine: whether it is up, and how fast it computes a prompt.

Must not know how the engine is started.
"""

import asyncio
import time
import uuid
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from prefixfleet.store.adapters import adapters_in
from prefixfleet.store.errors import ConfigError, ProtocolError

HEALTH_S = 5.0
POLL_S = 0.25
PROMPT_S = 120.0
"""The longest one measuring prompt may take."""
MEASURED_TOKENS = 1024
IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class EngineProbe:
    """Client of one engine's HTTP. Owned by the worker's event loop."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._model = model
        self._session = session

    async def healthy(self) -> bool:
        """Whether ``/health`` says yes now."""
        try:
            async with self._session.get(
                f"{self._url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def wait_healthy(self) -> None:
        """Return when it is up; bound this with a timeout of your own."""
        up = await self.healthy()
        while not up:
            await asyncio.sleep(POLL_S)
            up = await self.healthy()

    async def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that it serves now, by name.

        Raises:
            ProtocolError: it does not say.
        """
        url = f"{self._url}/v1/models"
        try:
            async with self._session.get(
                url, timeout=aiohttp.ClientTimeout(total=HEALTH_S)
            ) as response:
                if response.status == 404:
                    return {}
                return adapters_in(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ProtocolError(f"{url}: {type(error).__name__}: {error}") from error

    async def greet(self, adapter: str) -> None:
        """Ask ``adapter`` for a token: the engine's connector hears of an adapter with its first
        request only, and shall see its files as they were loaded. Whatever the answer says.

        Raises:
            ProtocolError: there was none.
        """
        question = {"model": adapter, "prompt": "a", "max_tokens": 1}
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                json=question,
                timeout=aiohttp.ClientTimeout(total=HEALTH_S),
            ) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ProtocolError(f"{self._url}: adapter {adapter!r}: {what}") from error

    async def in_flight(self) -> int:
        """Requests that it computes or that wait in it; 0 if it does not answer: then none can end.

        Raises:
            ConfigError: its ``/metrics`` do not say.
        """
        try:
            async with self._session.get(
                f"{self._url}/metrics", timeout=aiohttp.ClientTimeout(total=HEALTH_S)
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0
        return in_flight_of(text)

    async def wait_idle(self) -> None:
        """Return when nothing is `in_flight`; bound this with a timeout of your own."""
        busy = await self.in_flight()
        while busy:
            await asyncio.sleep(POLL_S)
            busy = await self.in_flight()

    async def prefill_tokens_per_s(self, max_tokens: int) -> float:
        """Speed of computing a prompt of real text that nothing has cached, after a warm-up.

        Raises:
            ConfigError: the engine does not answer a plain completion.
        """
        await self._prefill(text_sample()[:200], 32)
        count = min(MEASURED_TOKENS, max_tokens - 8)
        computed, seconds = await self._prefill(text_sample(), count)
        return computed / seconds

    async def _prefill(self, text: str, max_tokens: int) -> tuple[int, float]:
        """Tokens computed, and seconds that took."""
        question = {
            "model": self._model,
            "prompt": text,
            "truncate_prompt_tokens": max_tokens,
            "max_tokens": 1,
            "cache_salt": uuid.uuid4().hex,  # measured anew, and never found by anybody
        }
        started = time.monotonic()
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                json=question,
                timeout=aiohttp.ClientTimeout(total=PROMPT_S),
            ) as response:
                answer = await response.json(content_type=None)
                usage = answer["usage"] if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{self._url}: no answer to a prompt: {error!r}") from error
        if usage is None:
            raise ConfigError(f"{self._url}: status {response.status} for a prompt: {answer}")
        return int(usage["prompt_tokens"]), time.monotonic() - started


def in_flight_of(metrics: str) -> int:
    """Requests in an engine, by what its ``/metrics`` say. Raises `ConfigError` if they do not."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return int(sum(found[name] for name in IN_FLIGHT))
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"the engine's /metrics: expected gauges {' and '.join(IN_FLIGHT)} ({error!r})"
        ) from error


def text_sample() -> str:
    """A few thousand words of real text that every installation has: our own source."""
    folder = Path(__file__).parent
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))[:40_000]
