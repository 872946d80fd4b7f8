"""A node daemon as a process of its own: prints one line of JSON when it is up. It makes room
however long a machine stalls."""

import asyncio
import json
import os
import signal

import pytest
from patience import be_patient

from prefixfleet.cluster.services import node_service


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await node_service(os.environ)(lambda up: print(json.dumps(up), flush=True), stop)  # noqa: T201


if __name__ == "__main__":
    be_patient(pytest.MonkeyPatch())
    asyncio.run(main())
