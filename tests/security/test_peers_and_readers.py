"""What somebody on the network, with Redis, or beside an engine's socket may try."""

import pytest
import redis
from eventually import until
from hostile import introduce, raw_caller
from links import SECRET, Echo, Rig, some_bytes
from node_rig import SECRET as FLEET_SECRET
from node_rig import PlainEngine, fresh_chain, running_node, settings_of

from prefixfleet.store.memory_index import MemoryIndex
from prefixfleet.store.namespace import hash_key
from prefixfleet.store.redis_index import RedisIndex
from prefixfleet.transfer import wire
from prefixfleet.transfer.wire import Kind


class Recorder:
    """A raw connection that remembers what was sent over it."""

    def __init__(self, raw):
        self.raw = raw
        self.sent = []

    async def send(self, kind, body=b"", id=0):
        self.sent.append((kind, body, id))
        await self.raw.send(kind, body, id)

    async def receive(self):
        return await self.raw.receive()


async def test_recorded_frames_open_nothing_on_another_connection():
    """Each handshake has nonces of both sides: what proved somebody once proves nobody again."""
    async with Rig("tcp") as rig:
        service = Echo()
        listener = await rig.listen(rig.link("a"), some_bytes(4096), service)
        async with raw_caller(listener.contact) as raw:
            recorder = Recorder(raw)
            await introduce(recorder, SECRET)
            header, _ = await raw.receive()
            assert header.kind == Kind.WELCOME
            await recorder.send(Kind.ASK, b"question", 1)
            assert (await raw.receive())[0].kind == Kind.ANSWER
        asked = len(service.asked)

        async with raw_caller(listener.contact) as raw:
            kinds = []
            for kind, body, id in recorder.sent:
                await raw.send(kind, body, id)
            while not kinds or kinds[-1] == Kind.CHALLENGE:
                kinds.append((await raw.receive())[0].kind)

        assert kinds == [Kind.CHALLENGE, Kind.REFUSED]
        assert len(service.asked) == asked


async def test_without_the_secret_nobody_reads_or_asks():
    async with Rig("tcp") as rig:
        service = Echo()
        listener = await rig.listen(rig.link("a"), some_bytes(4096), service)
        for kind in (Kind.ASK, Kind.READ, Kind.PING, Kind.PROOF):
            async with raw_caller(listener.contact) as raw:
                body = wire.encode_ranges([wire.Range(0, 4096)]) if kind == Kind.READ else b""
                await raw.send(kind, body, 1)
                header, _ = await raw.receive()
                assert header.kind == Kind.REFUSED
                assert await raw.ended()

        assert service.asked == []


async def test_who_reads_redis_learns_neither_tokens_nor_keys(
    redis_server, fleet, tmp_path_factory
):
    """Hashes, names, addresses and numbers: nothing that opens a node or tells a prompt."""
    folder = tmp_path_factory.mktemp("n")
    index = RedisIndex(redis_server.url, fleet, lease_s=60, timeout_s=20)
    try:
        async with (
            running_node(index, settings_of(folder)) as node,
            PlainEngine.connected(node.settings.socket_path) as engine,
        ):
            chain = fresh_chain(5)
            await engine.put(chain)

            async def is_published():
                return await index.match(chain) == {"a": 5}

            await until(is_published)
            dump = everything_in(redis_server.url)
            contacts = node.record().contacts["tcp"]
    finally:
        await index.close()

    assert contacts.encode() in dump  # the dump is one of the right server
    for secret in (FLEET_SECRET, hash_key(FLEET_SECRET), engine.welcome["hash_key"]):
        assert secret not in dump
        assert secret.hex().encode() not in dump


def everything_in(url):
    found = []
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(count=1000):
            found += [key, repr(client.dump(key)).encode(), client.dump(key) or b""]
            match client.type(key):
                case b"hash":
                    found += [part for pair in client.hgetall(key).items() for part in pair]
                case b"string":
                    found.append(client.get(key))
    return b"\n".join(found)


@pytest.mark.parametrize("guess", [bytes(16), b"\xff" * 16, b"a guess of a hash"[:16]])
async def test_an_engine_that_guesses_hashes_finds_nothing(tmp_path_factory, guess):
    """Keyed with the cluster's secret, a hash cannot be computed from known text."""
    folder = tmp_path_factory.mktemp("n")
    async with (
        running_node(MemoryIndex(lease_s=60), settings_of(folder)) as node,
        PlainEngine.connected(node.settings.socket_path) as engine,
    ):
        await engine.put(fresh_chain(3))

        assert (await engine.prepare([guess]))["blocks"] == 0
        assert node.settings.socket_path.stat().st_mode & 0o077 == 0  # and only this user may ask
