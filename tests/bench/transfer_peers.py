"""One end of a rival engine for `transfer.py`, in a process of its own: their libraries clash.

Usage: transfer_peers.py mooncake|nixl source | target WHAT_THE_SOURCE_PRINTED
A target reads the name of a size from each line of its input and prints {"seconds": ...}.
"""

import base64
import ctypes
import json
import mmap
import os
import socket
import sys
import time

KIB, MIB = 1024, 1024 * 1024
SIZES = {
    "64KiB": (64 * KIB, 256),
    "1MiB": (MIB, 64),
    "16MiB": (16 * MIB, 16),
    "setup": (4 * KIB, 16),
}
"""Bytes of a block and how many of them make one pull."""
MEASURED = {size: pair for size, pair in SIZES.items() if size != "setup"}
POOL_BYTES = max(block * count for block, count in MEASURED.values())
POLL_S = 60


def pool(byte):
    """Memory that every page of is there, and its address."""
    memory = mmap.mmap(-1, POOL_BYTES)
    memory[:] = byte * POOL_BYTES
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Mooncake:
    """Transfer engine over tcp, peer-to-peer handshake."""

    def __init__(self, address):
        os.environ.setdefault("GLOG_minloglevel", "2")
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        started = self._engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", "")
        if started or self._engine.register_memory(address, POOL_BYTES):
            raise OSError(f"mooncake does not start: {started}")
        self._address = address

    def tell(self):
        name = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return {"name": name, "address": self._address}

    def prepare(self, told, block, count):
        places = [i * block for i in range(count)]
        ours = [self._address + place for place in places]
        theirs = [told["address"] + place for place in places]
        lengths = [block] * count

        def read():
            failed = self._engine.batch_transfer_sync_read(told["name"], ours, theirs, lengths)
            assert failed == 0, failed

        return read


class Nixl:
    """NIXL's UCX backend."""

    def __init__(self, address):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._address = address
        self._agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(address, POOL_BYTES, 0, "pool")], "DRAM")

    def tell(self):
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._address}

    def prepare(self, told, block, count):
        name = self._agent.add_remote_agent(base64.b64decode(told["metadata"]))
        places = [i * block for i in range(count)]
        ours = self._agent.get_xfer_descs([(self._address + p, block, 0) for p in places], "DRAM")
        theirs = self._agent.get_xfer_descs(
            [(told["address"] + p, block, 0) for p in places], "DRAM"
        )

        def read():
            handle = self._agent.initialize_xfer("READ", ours, theirs, name)
            state = self._agent.transfer(handle)
            ends = time.monotonic() + POLL_S
            while state != "DONE":
                assert state == "PROC", state
                assert time.monotonic() < ends, "does not end"
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)

        return read


def serve_target(engine, memory, told):
    reads = {size: engine.prepare(told, *pair) for size, pair in MEASURED.items()}
    reads["64KiB"]()
    assert memory[: 1 << 16] == b"s" * (1 << 16), "the rival has not read"
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        reads[line.strip()]()
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


def main(name, role, told="{}"):
    memory, address = pool(b"s" if role == "source" else b"t")
    try:
        engine = {"mooncake": Mooncake, "nixl": Nixl}[name](address)
    except (ImportError, OSError) as error:
        print(json.dumps({"absent": f"{name}: {error}"}), flush=True)
        return
    if role == "target":
        serve_target(engine, memory, json.loads(told))
    else:
        print(json.dumps(engine.tell()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
