"""Speed of gather and scatter, exact and in 8 bits, over a plain copy of the same bytes.

Run: python tests/bench/kernels.py [--json] [--device cuda]
On the CPU everything runs in one thread, whose own time counts, and memcpy runs between the
kernels, so that a busy machine slows both; figures are medians of the rounds' ratios. On a GPU its
own time counts, and what `kernels_gpu` measures is added. After `--budget-s` each figure gets one
round and no more. Bytes are those of the KV, not of what they are encoded to. The last line is
one JSON object: the worst of the shapes.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[2]))

import torch

from prefixfleet.kernels.encoding import ENCODINGS, encoded_bytes
from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import Content, PagedLayout
from tests.bench import kernels_gpu

MIB = 1 << 20
WORKING_SET = {"cpu": 64 * MIB, "cuda": 2048 * MIB}  # beyond any cache
ROUNDS = {"cpu": 5, "cuda": 20}
LOSSY = [name for name in ENCODINGS if name != "exact"]


def nhd(layers, heads, tokens, channels, dtype=torch.bfloat16):
    """vLLM on a GPU: [L, B, N, H, C] in memory."""

    def make(blocks, device):
        memory = torch.zeros(
            layers, blocks, tokens, heads, 2 * channels, dtype=dtype, device=device
        )
        return list(memory.transpose(2, 3)), Content.PLAIN

    return make, tokens


def cpu_vec(layers, heads, tokens, channels, dtype):
    """vLLM on a CPU: [L, B, H, N, C] in memory, K transposed inside."""

    def make(blocks, device):
        memory = torch.zeros(
            layers, blocks, heads, tokens, 2 * channels, dtype=dtype, device=device
        )
        return list(memory), Content.KEYS_TRANSPOSED

    return make, tokens


def mla(layers, tokens, channels):
    """MLA's latent: [L, B, N, D]."""

    def make(blocks, device):
        shape = (layers, blocks, tokens, channels)
        return list(torch.zeros(shape, dtype=torch.bfloat16, device=device)), Content.LATENT

    return make, tokens


SHAPES = {
    "smollm2-135m float32 cpu 32": cpu_vec(30, 3, 32, 64, torch.float32),
    "smollm2-135m bfloat16 cpu 32": cpu_vec(30, 3, 32, 64, torch.bfloat16),
    "llama-3-8b 16": nhd(32, 8, 16, 128),
    "llama-3-8b 64": nhd(32, 8, 64, 128),
    "llama-3-70b tp8 16": nhd(80, 1, 16, 128),
    "llama-3-70b tp8 64": nhd(80, 1, 64, 128),
    "deepseek-v3 mla 16": mla(61, 16, 576),
    "deepseek-v3 mla 64": mla(61, 64, 576),
}


def make_caches(make, device, working_set):
    """(caches, layout, ids of half of the blocks, scattered)."""
    tensors, content = make(1, "cpu")
    block_bytes = sum(tensor.nbytes for tensor in tensors)
    num_blocks = max(2, 2 * working_set // block_bytes) | 1  # engines have no power of two either
    tensors, content = make(num_blocks, device)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape[1:], device=device))
    caches = {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}
    ids = random.Random(0).sample(range(num_blocks), num_blocks // 2)
    return caches, PagedLayout.from_tensors(caches, content=content), ids


def aligned_slots(count, payload_bytes, device):
    """As in a pool: each slot on its own pages, the payload after 64 bytes of header."""
    stride = -(-(64 + payload_bytes) // 4096) * 4096
    pool = torch.zeros(count * stride + 4096, dtype=torch.uint8, device=device)
    first = -pool.data_ptr() % 4096
    return [pool[first + i * stride + 64 :][:payload_bytes] for i in range(count)]


def cpu_seconds(work):
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(make, device, seconds, deadline):
    """Ratios over one memcpy of it all, by encoding; "by_block" is memcpy a block at a time."""
    caches, layout, ids = make_caches(make, device, WORKING_SET[device])
    source = torch.ones(len(ids), layout.block_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    speeds, rounds = [], []

    def ratio(work):
        work()  # compile, and touch every page
        ratios = []
        while not ratios or (len(ratios) < ROUNDS[device] and time.monotonic() < deadline):
            copy_s = seconds(lambda: target.copy_(source))
            speeds.append(source.nbytes / copy_s / 1e9)
            ratios.append(copy_s / seconds(work))
        rounds.append(len(ratios))
        return round(median(ratios), 3)

    def by_block(slots):
        for row, slot in zip(source, slots, strict=True):
            slot.copy_(row)

    figures = {}
    if device == "cpu":  # a GPU's launches of single copies say nothing of its memory
        exact_slots = aligned_slots(len(ids), layout.block_bytes, device)
        figures["by_block"] = ratio(lambda: by_block(exact_slots))
    for name in names_for(layout):
        mover = mover_for(caches, layout, name)
        slots = aligned_slots(len(ids), mover.payload_bytes, device)
        figures[name] = {
            "gather": ratio(lambda m=mover, s=slots: m.gather(ids, s)),
            "scatter": ratio(lambda m=mover, s=slots: m.scatter(ids, s)),
        }
    memcpy = {"memcpy_gb_per_s": round(median(speeds), 2), "least_rounds": min(rounds)}
    return memcpy | figures


def make_hit(name, num_tokens, device):
    """Caches of a shape, as `make_caches`, with ids for so many tokens."""
    make, tokens = SHAPES[name]
    block_bytes = sum(tensor.nbytes for tensor in make(1, "cpu")[0])
    num_blocks = num_tokens // tokens
    caches, layout, ids = make_caches(make, device, num_blocks * block_bytes)
    return caches, layout, ids[:num_blocks]


def names_for(layout):
    return [n for n in ENCODINGS if n != "fp8-values" or layout.content is not Content.LATENT]


def tokens_per_gib(make, tokens):
    """How many tokens' KV a GiB of slots holds, by encoding."""
    tensors, content = make(2, "cpu")
    caches = {f"layers.{i}": tensor for i, tensor in enumerate(tensors)}
    layout = PagedLayout.from_tensors(caches, content=content)
    return {n: round((1 << 30) / encoded_bytes(layout, n) * tokens) for n in names_for(layout)}


def shapes_of_engines_on(device):
    return [name for name in SHAPES if device == "cpu" or " cpu " not in name]


def worst(figures, names, direction):
    return min(
        shape[name][direction] for shape in figures.values() for name in names if name in shape
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="only this one")
    parser.add_argument("--budget-s", type=float, default=120)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    if args.device == "cuda" and (why_not := kernels_gpu.reason_not_to_run()):
        parser.error(f"--device cuda: {why_not}")
    torch.set_num_threads(1)

    clock = kernels_gpu.GpuClock() if args.device == "cuda" else None
    seconds = clock.seconds if clock else cpu_seconds

    figures, deadline = {}, time.monotonic() + args.budget_s
    for name in args.shape or shapes_of_engines_on(args.device):
        figures[name] = measure(SHAPES[name][0], args.device, seconds, deadline)
        if not args.json:
            print(f"{name}: {figures[name]}", flush=True)

    exact = [worst(figures, ["exact"], direction) for direction in ("gather", "scatter")]
    result = {
        "device": args.device,
        "exact_over_memcpy": min(exact),
        "encode_over_memcpy": worst(figures, LOSSY, "gather"),
        "decode_over_memcpy": worst(figures, LOSSY, "scatter"),
        "shapes": figures,
        "tokens_per_gib": {name: tokens_per_gib(*SHAPES[name]) for name in figures},
    }
    if clock:
        hit = make_hit("llama-3-8b 16", kernels_gpu.HIT_TOKENS, args.device)
        result |= kernels_gpu.figures(*hit, seconds) | {"late": clock.late}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
