"""Many that connect at once are accepted in a few turns of the loop, not one a turn."""

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager

import pytest
import uvloop
from certificates import Authority
from eventually import until

from prefixfleet.router.bursts import AT_ONCE, Bursts

CLIENTS = 64


class Turns:
    """Counts turns of the loop while it is open."""

    def __init__(self):
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._count()

    def _count(self):
        self.count += 1
        self._next = self._loop.call_soon(self._count)

    def close(self):
        self._next.cancel()


class Greeting(asyncio.Protocol):
    """Says hello, and notes when that was."""

    def __init__(self, met, now):
        self._met = met
        self._now = now

    def connection_made(self, transport):
        self._met.append(self._now())
        transport.write(b"hello")
        transport.close()


@asynccontextmanager
async def listening(met, *, now=int, tls=None, bursts=True):
    made = []

    def factory():
        if made:
            made[0].accepted()
        return Greeting(met, now)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, backlog=1024, ssl=tls)
    if bursts:
        made.append(Bursts(server.sockets, factory, tls=tls))
    try:
        yield server.sockets[0].getsockname()
    finally:
        for each in made:
            each.close()
        server.close()


def connected(address, count):
    return [socket.create_connection(address, 10) for _ in range(count)]


async def turns_to_meet(count, **options):
    """Of the loop, from the first that is accepted of so many at once to the last."""
    met, turns = [], Turns()
    async with listening(met, now=lambda: turns.count, **options) as address:
        clients = connected(address, count)  # the loop does not run meanwhile
        await until(lambda: len(met) == count)
        turns.close()
        for client in clients:
            assert await asyncio.to_thread(client.recv, 5) == b"hello"
            client.close()
    return met[-1] - met[0]


def test_many_at_once_are_accepted_together():
    turns = uvloop.run(turns_to_meet(CLIENTS))
    assert turns < uvloop.run(turns_to_meet(CLIENTS, bursts=False)) / 2


def test_more_than_one_look_accepts_are_accepted_too():
    uvloop.run(turns_to_meet(AT_ONCE + 10))


def test_one_after_the_other_is_accepted():
    async def go():
        met = []
        async with listening(met) as address:
            for number in range(3):
                client = await asyncio.to_thread(connected, address, 1)
                assert await asyncio.to_thread(client[0].recv, 5) == b"hello"
                client[0].close()
                assert len(met) == number + 1

    uvloop.run(go())


def test_nobody_can_connect_once_it_is_closed():
    async def go():
        async with listening([]) as address:
            pass
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(connected, address, 1)

    uvloop.run(go())


def test_a_burst_over_tls_is_served_though_some_speak_something_else(tmp_path):
    authority = Authority(tmp_path, "test")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = authority.issue("router")
    tls.load_cert_chain(certificate.cert, certificate.key)

    async def go():
        met = []
        async with listening(met, tls=tls) as address:
            plain = connected(address, 8)
            for client in plain:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            trust = ssl.create_default_context(cafile=str(authority.file))

            async def ask():
                reader, writer = await asyncio.open_connection(
                    *address, ssl=trust, server_hostname="127.0.0.1"
                )
                assert await reader.read() == b"hello"
                writer.close()

            await asyncio.gather(*(ask() for _ in range(16)))
            for client in plain:
                client.close()

    uvloop.run(go())
