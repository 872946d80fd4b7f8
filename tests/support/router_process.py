"""``prefixfleet-router`` as a process of its own, in front of fake engines of the test."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from router_rig import Rig
from upstreams import SECRET, FakeEngine

from prefixfleet.store.registry import WorkerRegistry

START_S = 60.0


@contextlib.asynccontextmanager
async def router_process(
    rig: Rig, folder: Path, *arguments: str, **settings: Any
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Its base URL, and the process; ended with SIGTERM if it still runs."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    environ = {n: v for n, v in os.environ.items() if not n.startswith("PREFIXFLEET_")}
    environ |= {
        "PREFIXFLEET_REDIS_URL": rig.redis_url,
        "PREFIXFLEET_FLEET": rig.fleet,
        "PREFIXFLEET_SECRET_FILE": str(secret),
        "PREFIXFLEET_ROUTER_PORT": "0",
    }
    environ |= {f"PREFIXFLEET_ROUTER_{name.upper()}": str(v) for name, v in settings.items()}
    with (folder / "router.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "prefixfleet.router", *arguments,
            env=environ, stdout=asyncio.subprocess.PIPE, stderr=log,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        assert "http://" in line, (folder / "router.log").read_text()[-2000:]
        yield line.split()[-1], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), START_S)


async def announced(rig: Rig, *engines: FakeEngine) -> None:
    """Put ``engines`` into the registry of the rig's fleet."""
    registry = WorkerRegistry(rig.redis_url, rig.fleet, timeout_s=20)
    for engine in engines:
        await registry.announce(engine.record(), ttl_s=600)
    await registry.close()
