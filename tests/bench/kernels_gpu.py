"""What `kernels` measures on a GPU only: its own time of kernels, fused against separate steps,
and a hit of 32 k tokens between a pool in host memory and the paged KV, as the connector copies.
"""

import importlib.util
import mmap
import time
from statistics import median

import torch

from prefixfleet.cluster.connector_paged import BATCH_BLOCKS, PagedKv
from prefixfleet.kernels.mover import mover_for
from prefixfleet.store.slot import SlotLayout, copy_out, seal

HIT_TOKENS = 32_768
ROUNDS = 20
HIT_ROUNDS = 5
HIT_ENCODINGS = ("exact", "fp8", "int8-fp8")


def reason_not_to_run():
    """Why this machine cannot run the kernels on a GPU; empty if it can."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no NVIDIA GPU; run it on a machine with one, with a "
            "build of torch for CUDA and its driver (`python -c 'import torch; "
            "print(torch.cuda.is_available())'` must say True)"
        )
    if importlib.util.find_spec("triton") is None:
        return "there is no triton package beside torch; install the one of this torch release"
    return ""


class GpuClock:
    """Times what the GPU does, without what the host takes to launch it: the GPU sleeps until all
    is in its queue. Else the host's tables of thousands of slots would be what is measured.
    """

    def __init__(self):
        self.late = 0  # times that the GPU woke before all was launched: these hold host time too
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first wakes the GPU up
            began.record()
            torch.cuda._sleep(10_000_000)
            ended.record()
            ended.synchronize()
        self._cycles_per_s = 10_000_000 / (began.elapsed_time(ended) / 1e3)

    def seconds(self, work):
        """For ``work``, which was done once before."""
        start = time.perf_counter()
        work()
        pause_s = 2 * (time.perf_counter() - start)
        for _ in range(3):
            torch.cuda.synchronize()
            taken, in_time = self._once(work, pause_s)
            if in_time:
                return taken
            pause_s *= 4
        self.late += 1
        return taken

    def _once(self, work, pause_s):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(pause_s * self._cycles_per_s))
        began.record()
        work()
        ended.record()
        in_time = not began.query()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3, in_time


def figures(caches, layout, ids, seconds):
    """Of caches as Llama-3-8B has them in blocks of 16, and ids of a whole hit."""
    hits = {f"hit_{name}": hit(caches, layout, ids, name) for name in HIT_ENCODINGS}
    return hits | {"fused_over_separate": fused_over_separate(caches, layout, ids[:256], seconds)}


def fused_over_separate(caches, layout, ids, seconds):
    """Time of gather, then torch's own FP8 quantisation, over the fused gather's."""
    fused, exact = mover_for(caches, layout, "fp8"), mover_for(caches, layout)
    device = next(iter(caches.values())).device
    slots = list(torch.empty(len(ids), fused.payload_bytes, dtype=torch.uint8, device=device))
    staging = torch.empty(len(ids), layout.block_bytes, dtype=torch.uint8, device=device)
    heads, tokens, pair = next(iter(caches.values())).shape[1:]
    shape = (len(ids), len(caches), tokens, heads, 2, pair // 2)

    def separate():
        exact.gather(ids, list(staging))
        kv = staging.view(torch.bfloat16).view(shape)
        scale = kv.abs().amax((2, 5), keepdim=True).float() / 448
        (kv / scale).to(torch.float8_e4m3fn)

    fused.gather(ids, slots)
    separate()
    ratios = [seconds(separate) / seconds(lambda: fused.gather(ids, slots)) for _ in range(ROUNDS)]
    return round(median(ratios), 2)


def hit(caches, layout, ids, encoding):
    """Seconds of wall time: blocks saved into a pool and sealed, loaded and proved, and moved
    between page-locked rows and the paged KV alone, which the device bounds.
    """
    paged = PagedKv(caches, layout, encoding)
    slots = SlotLayout(payload_bytes=paged.payload_bytes)
    pool = memoryview(mmap.mmap(-1, slots.slot_bytes * len(ids)))
    homes = [(b, pool[i * slots.slot_bytes :][: slots.slot_bytes]) for i, b in enumerate(ids)]
    work = [homes[first : first + BATCH_BLOCKS] for first in range(0, len(ids), BATCH_BLOCKS)]
    rows = [row.numpy().data for row in paged.rows]

    def save():
        for batch in work:
            targets = [slots.payload(home) for _, home in batch]
            paged.read([i for i, _ in batch], targets, paged.mark())
            for i, home in batch:
                seal(home, slots, bytes(16), name_of(i))

    def load(*, proved):
        for batch in work:
            for row, (i, home) in enumerate(batch):
                if proved:
                    copy_out(home, slots, bytes(16), name_of(i), 0, rows[row])
                paged.send(row)
            paged.write([i for i, _ in batch], paged.mark())

    return {
        "save_s": wall(save),
        "load_s": wall(lambda: load(proved=True)),
        "load_without_proof_s": wall(lambda: load(proved=False)),
    }


def name_of(block_id):
    return block_id.to_bytes(16, "little")


def wall(work):
    work()  # touch every page
    times = []
    for _ in range(HIT_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(median(times), 5)
