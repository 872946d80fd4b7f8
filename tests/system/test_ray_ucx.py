"""UCX inside Ray actors, whose event loop is uvloop's on a thread of Ray's."""

import time
from typing import Any

import pytest
import ray

from prefixfleet.transfer import ucx_binding

pytestmark = pytest.mark.skipif(
    not ucx_binding.available(), reason="no Python binding of UCX is installed"
)

BYTES = 4 * 1024 * 1024


class Serving:
    """Serves zeros and ones to the other one."""

    def __init__(self, name):
        from prefixfleet.transfer.ucx import UcxLink

        self.link = UcxLink(node=name, secret=b"s" * 16)

    async def listen(self):
        self.segment = memoryview(bytearray(b"01" * (BYTES // 2)))
        self.listener = await self.link.listen("127.0.0.1", self.segment, self)
        return self.listener.contact

    async def answer(self, caller, question):
        return question

    def grants(self, caller, part):
        return True

    def disconnected(self, caller):
        pass

    async def connect(self, contact):
        self.peer = await self.link.connect(contact, deadline=time.monotonic() + 30)

    async def read(self):
        """Whether the bytes are right, or the name of the error."""
        from prefixfleet.store.errors import PullFailed
        from prefixfleet.transfer.link import Range

        target = memoryview(bytearray(BYTES))
        try:
            await self.peer.read([Range(0, BYTES)], [target], deadline=time.monotonic() + 30)
        except PullFailed as error:
            return error.reason
        return bytes(target) == b"01" * (BYTES // 2)

    async def read_until_it_fails(self):
        """Name of the error."""
        while (result := await self.read()) is True:
            pass
        return result

    async def close(self):
        await self.peer.close()
        await self.link.close()


Node: Any = ray.remote(Serving)


@pytest.fixture
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_actors_read_from_each_other_until_one_is_killed(cluster):
    source, target = Node.remote("source"), Node.remote("target")
    contact = ray.get(source.listen.remote(), timeout=60)
    ray.get(target.connect.remote(contact), timeout=60)

    assert ray.get([target.read.remote() for _ in range(5)], timeout=60) == [True] * 5
    ray.kill(source)
    assert ray.get(target.read_until_it_fails.remote(), timeout=60) == "peer_lost"

    ray.get(target.close.remote(), timeout=60)
