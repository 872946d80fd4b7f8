"""Figures of the block store: pages, pool operations, metadata, lookups, disk over fio, recovery.

Run: python tests/bench/store.py [--json] [--blocks 1000000] [--dir FOLDER]
The last line is one JSON object. fio is optional (Debian: apt-get install fio); without it the
ratios over fio are null.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from prefixfleet.router.arguments import count
from prefixfleet.store.bucket_file import DiskBlock
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool
from prefixfleet.store.populate import Populating
from prefixfleet.store.slot import SlotLayout
from prefixfleet.store.slot_files import SlotFiles

CHAIN_BLOCKS = 2000
ROUNDS = 3
MIB = 1024 * 1024
NAMESPACE = b"n" * 16


def names(start, count):
    return [n.to_bytes(16, "big") for n in range(start, start + count)]


def rate(count, seconds):
    return round(count / seconds)


def fill(num_blocks):
    pool = SlotPool(num_blocks, LruOrder(), time.monotonic)
    started = time.perf_counter()
    for first in range(1, num_blocks + 1, CHAIN_BLOCKS):
        chain = names(first, min(CHAIN_BLOCKS, num_blocks + 1 - first))
        with pool.reserve(b"", chain) as reservation:
            for block in chain:
                reservation.commit(block)
    return pool, time.perf_counter() - started


def bench_pool(num_blocks):
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    pool, _ = fill(num_blocks // 10)
    pool_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del pool
    pool, fill_s = fill(num_blocks)
    chain = names(1, CHAIN_BLOCKS)
    lookups, pins = [], []
    for _ in range(20):
        started = time.perf_counter()
        assert pool.match(chain) == CHAIN_BLOCKS
        lookups.append(time.perf_counter() - started)
        started = time.perf_counter()
        pool.pin(chain).release()
        pins.append((time.perf_counter() - started) / CHAIN_BLOCKS)
    started = time.perf_counter()
    evicted = 0
    while evicted < num_blocks // 4:
        victims = pool.choose_victims(256)
        pool.free(victims)
        evicted += len(victims.hashes)
    evict_s = time.perf_counter() - started
    return {
        "blocks": num_blocks,
        "take_per_s": rate(num_blocks, fill_s),
        "pin_and_release_per_s": rate(1, statistics.median(pins)),
        "evict_per_s": rate(evicted, evict_s),
        "metadata_bytes_per_block": round(pool_bytes / (num_blocks // 10), 1),
        "lookup_2000_blocks_ms": round(statistics.median(lookups) * 1000, 3),
    }


def bench_disk(folder, layout, total_bytes, batch):
    """Seconds of writing and of reading ``total_bytes`` in batches of slots, through the tier."""
    count = total_bytes // layout.slot_bytes
    files = SlotFiles(folder, layout, NAMESPACE, count)
    files.recover()
    memory = memoryview(mmap.mmap(-1, layout.slot_bytes * batch))
    memory[:] = os.urandom(layout.slot_bytes) * batch
    views = [memory[i * layout.slot_bytes : (i + 1) * layout.slot_bytes] for i in range(batch)]
    chain = names(1, count)
    prime(files, count, views[0])
    started = time.perf_counter()
    for first in range(0, count - batch + 1, batch):
        blocks = [
            DiskBlock(s, chain[s], chain[s - 1] if s else b"", s)
            for s in range(first, first + batch)
        ]
        files.write(list(zip(blocks, views, strict=True)))
    write_s = time.perf_counter() - started
    started = time.perf_counter()
    for slot in range(count):
        files.read(slot, views[slot % batch])
    read_s = time.perf_counter() - started
    files.close()
    return write_s, read_s


def prime(files, count, view):
    """Make every bucket, so that taking the space is not part of the write figure."""
    for slot in range(0, count, files.bucket_slots):
        files.write([(DiskBlock(slot, bytes(15) + b"p", b"", 0), view)])
        files.forget([slot])


def fio(folder, mode, block_bytes, total_bytes, batch_bytes):
    """Bytes a second of the same pattern: direct, sequential, fdatasync after each batch."""
    command = [
        "fio", "--name=x", f"--directory={folder}", f"--rw={mode}", f"--bs={block_bytes}",
        f"--size={total_bytes}", "--direct=1", "--ioengine=psync", "--output-format=json",
        "--filename=fio.tmp", "--fallocate=posix", "--refill_buffers=0",
    ]  # fmt: skip
    if mode == "write":
        command += [f"--fdatasync={max(1, batch_bytes // block_bytes)}", "--overwrite=0"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][mode]
    return job["bw_bytes"]


def bench_ssd(folder, total_bytes):
    layout = SlotLayout(payload_bytes=MIB - 64)
    batch = 16
    ours = {"write": [], "read": []}
    theirs = {"write": [], "read": []}
    for _ in range(ROUNDS):  # interleaved: the machine's speed drifts
        write_s, read_s = bench_disk(folder / "ours", layout, total_bytes, batch)
        shutil.rmtree(folder / "ours")
        ours["write"].append(total_bytes / write_s)
        ours["read"].append(total_bytes / read_s)
        if shutil.which("fio"):
            write_block = batch * layout.slot_bytes
            theirs["write"].append(fio(folder, "write", write_block, total_bytes, write_block))
            theirs["read"].append(fio(folder, "read", layout.slot_bytes, total_bytes, 0))
            (folder / "fio.tmp").unlink()
    figures = {}
    for mode in ("write", "read"):
        mine = statistics.median(ours[mode])
        figures[f"ssd_{mode}_bytes_per_s"] = round(mine)
        fio_rate = statistics.median(theirs[mode]) if theirs[mode] else None
        figures[f"ssd_{mode}_over_fio"] = round(mine / fio_rate, 3) if fio_rate else None
    return figures


def bench_recovery(folder, num_blocks):
    layout = SlotLayout(payload_bytes=4000)
    files = SlotFiles(folder, layout, NAMESPACE, num_blocks)
    files.recover()
    memory = memoryview(mmap.mmap(-1, layout.slot_bytes))
    chain = names(1, num_blocks)
    for first in range(0, num_blocks, 4096):
        span = range(first, min(first + 4096, num_blocks))
        files.write([(DiskBlock(s, chain[s], chain[s - 1] if s else b"", s), memory) for s in span])
    files.close()
    again = SlotFiles(folder, layout, NAMESPACE, num_blocks)
    started = time.perf_counter()
    found = again.recover()
    pool = SlotPool(num_blocks, LruOrder(), time.monotonic)
    pool.restore((e.slot, e.block, e.parent) for e in found)
    seconds = time.perf_counter() - started
    again.close()
    assert len(found) == num_blocks
    return {"recovery_s_per_100k_blocks": round(seconds * 100_000 / num_blocks, 3)}


def bench_pages(size):
    """Processor time of writing a new mapping's bytes once, over writing them again: as it is made,
    with its pages populated first, and of another process's mapping of the same file."""
    fd = os.memfd_create("pool")
    try:
        os.posix_fallocate(fd, 0, size)
        fresh, other, ready = (np.frombuffer(mmap.mmap(fd, size), np.uint8) for _ in range(3))
        first, again = write_s(fresh), write_s(fresh)
        shared = write_s(other)
        populating = Populating(memoryview(ready), huge=False)
        while populating.running:
            time.sleep(0.01)
        populated = write_s(ready)
    finally:
        os.close(fd)
    costs = {"first": first, "shared": shared, "populated": populated}
    return {f"{name}_touch_over_write": round(cost / again, 2) for name, cost in costs.items()}


def write_s(array):
    began = time.process_time()
    array[:] = 1
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--blocks", type=count(100_000_000), default=1_000_000)
    parser.add_argument("--disk-mib", type=count(1 << 20), default=512)
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    figures = bench_pages(256 * MIB) | bench_pool(options.blocks)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        figures |= bench_ssd(Path(folder), options.disk_mib * MIB)
        figures |= bench_recovery(Path(folder) / "recovery", min(100_000, options.blocks))
    if not options.json:
        for name, value in figures.items():
            print(f"{name:32} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
