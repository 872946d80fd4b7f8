"""What is UCX's own: its thread, its settings, its life inside other programs."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time

import pytest
from eventually import until
from hostile import raw_listener, welcome
from links import SECRET, Echo, Rig, link_source, read, some_bytes, soon

from prefixfleet.store.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError
from prefixfleet.transfer import ucx_binding
from prefixfleet.transfer.link import Range
from prefixfleet.transfer.ucx import UcxLink

pytestmark = pytest.mark.skipif(
    "ucxx" not in ucx_binding.available(), reason="the Python binding ucxx is not installed"
)


def run_script(source):
    """Run a program of its own; returns (exit status, output)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


LOOPBACK = """
    import asyncio, sys, time
    import uvloop
    from prefixfleet.transfer.link import Range
    from prefixfleet.transfer.ucx import UcxLink

    class Service:
        async def answer(self, caller, question): return question
        def grants(self, caller, part): return True
        def disconnected(self, caller): pass

    async def main():
        a, b = UcxLink(node="a", secret=b"s" * 16), UcxLink(node="b", secret=b"s" * 16)
        listener = await a.listen("127.0.0.1", memoryview(bytearray(b"x" * 1000)), Service())
        peer = await b.connect(listener.contact, deadline=time.monotonic() + 20)
        target = memoryview(bytearray(1000))
        await peer.read([Range(0, 1000)], [target], deadline=time.monotonic() + 20)
        assert target == b"x" * 1000
"""


def test_it_runs_under_uvloop_and_leaves_without_a_word():
    status, output = run_script(
        LOOPBACK
        + """
        await peer.close(); await listener.close(); await b.close(); await a.close()
    uvloop.run(main())
    """
    )

    assert (status, output) == (0, "")


def test_a_program_that_forgets_to_close_still_ends():
    status, output = run_script(LOOPBACK + "\n    asyncio.run(main())\n")

    assert status == 0, output


def test_it_starts_in_a_process_forked_after_import():
    """Ray workers are forked from a process that may have imported everything."""
    status, output = run_script(
        LOOPBACK
        + """
        await peer.close(); await listener.close(); await b.close(); await a.close()
    import os
    pid = os.fork()
    if pid == 0:
        asyncio.run(main())
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    )

    assert status == 0, output


async def test_an_idle_connection_costs_next_to_no_cpu():
    """UCX's own asyncio modes spin; a daemon is idle most of the time."""
    async with Rig("ucx") as rig:
        _, peer = await rig.pair(some_bytes(1000), Echo())
        await read(peer, [Range(0, 1000)])
        before = time.process_time()

        await asyncio.sleep(0.5)

        assert time.process_time() - before < 0.1


async def test_a_hundred_connections_leave_no_descriptor_behind():
    async with Rig("ucx") as rig:
        listener, _ = await rig.pair(some_bytes(1000), Echo())
        link = rig.link("c")

        async def connect_and_read():
            peer = await link.connect(listener.contact, deadline=soon())
            await read(peer, [Range(0, 1000)])
            await peer.close()

        await connect_and_read()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            await connect_and_read()

        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)


async def test_a_read_under_way_ends_when_its_peer_is_closed():
    async with link_source("ucx", 1 << 20) as source, Rig("ucx") as rig:
        peer = await rig.connect(rig.link("b"), source.told["contact"])
        await read(peer, [Range(0, 1000)])
        source.freeze()
        reading = asyncio.create_task(read(peer, [Range(0, 1 << 20)]))
        await asyncio.sleep(0)

        await peer.close()

        with pytest.raises(PeerLost):
            await reading


async def test_one_lost_peer_does_not_disturb_the_others():
    async with link_source("ucx", 1 << 20) as doomed, Rig("ucx") as rig:
        link = rig.link("b")
        lost = await rig.connect(link, doomed.told["contact"])
        listener = await rig.listen(rig.link("a"), some_bytes(1 << 20), Echo())
        fine = await rig.connect(link, listener.contact)
        await read(lost, [Range(0, 10)])
        await doomed.kill()

        with pytest.raises(PeerLost):
            await read(lost, [Range(0, 1 << 20)])

        assert await read(fine, [Range(0, 1 << 20)]) == [some_bytes(1 << 20)]


@pytest.mark.parametrize("attachment", [b"", b"\xc1", b"\x80"])
async def test_a_listener_that_sends_junk_about_its_memory_is_refused(attachment):
    async def behave(raw):
        await welcome(raw, attachment=attachment)

    async with raw_listener(behave) as contact, Rig("ucx") as rig:
        with pytest.raises(ProtocolError):
            await rig.connect(rig.link("b"), contact.replace("tcp:", "ucx:"))


async def test_a_peer_that_ucx_has_no_way_to_is_lost(monkeypatch):
    async with Rig("ucx") as rig:
        monkeypatch.setenv("UCX_TLS", "tcp")
        listener = await rig.listen(rig.link("a"), some_bytes(16), Echo())
        monkeypatch.setenv("UCX_TLS", "self,sysv")

        with pytest.raises(PeerLost, match="UCX_NET_DEVICES"):
            await rig.connect(rig.link("b"), listener.contact)


async def test_the_lanes_and_devices_that_ucx_chose_show():
    async with Rig("ucx") as rig:
        _, peer = await rig.pair(some_bytes(1000), Echo())

        assert peer.lanes.startswith("ucx:")
        assert "/" in peer.lanes


def test_the_environment_wins_over_our_settings():
    ours = ucx_binding.settings({"UCX_TCP_TX_SEG_SIZE": "64k", "HOME": "/"})

    assert "TCP_TX_SEG_SIZE" not in ours
    assert ours["TCP_RX_SEG_SIZE"] == "1m"


async def test_a_setting_that_ucx_cannot_use_stops_the_start_and_says_so(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
    link = UcxLink(node="a", secret=SECRET)

    with pytest.raises(ConfigError, match="UCX_TLS"):
        await link.listen("127.0.0.1", some_bytes(10), Echo())


async def test_a_binding_that_is_not_here_stops_the_start_and_says_what_to_install():
    if "ucp" in ucx_binding.available():
        pytest.skip("both bindings are installed")
    link = UcxLink(node="a", secret=SECRET, binding="ucp")

    with pytest.raises(ConfigError, match=r"prefixfleet\[ucx\]"):
        await link.listen("127.0.0.1", some_bytes(10), Echo())


async def test_where_ucx_does_not_start_to_read_the_peer_is_lost(monkeypatch):
    """As where descriptors have run out: a pull goes on over another link, a probe just ends."""
    monkeypatch.setenv("UCX_TLS", "carrier_pigeon")
    link = UcxLink(node="a", secret=SECRET)

    with pytest.raises(PeerLost, match="UCX_TLS"):
        await link.connect("ucx://127.0.0.1:7000", deadline=soon())


async def test_a_deadline_while_connecting_leaves_nothing_behind():
    async with link_source("ucx", 1000) as source, Rig("ucx") as rig:
        link = rig.link("b")
        await (await rig.connect(link, source.told["contact"])).close()
        source.freeze()

        with pytest.raises(DeadlineExceeded):
            await link.connect(source.told["contact"], deadline=soon(0.1))
