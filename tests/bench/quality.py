"""What 8-bit blocks do to the answers of a real model.

A prompt's full blocks go through encode and decode, as a reader of the blocks gets them; what
follows is computed on top. Against exact blocks: the KL divergence of the next-token distribution
at each position of the text that follows, how often the likeliest token is the same, and greedy
continuations. Text is what comes with Python: its language reference, and the descriptions and
licences of the installed packages.

    python tests/bench/quality.py --prompts 200 --budget-s 7200 --json

Results are kept by prompt, a line each; a run goes on where the last one stopped. Several may
run at once, each with its part of the prompts (`--part 1/2`, `--part 2/2`); whichever ends last
sums up all of them, as does a later run with `--budget-s 0`.
"""

import argparse
import hashlib
import importlib.metadata
import json
import pydoc_data.topics
import sys
import time
from pathlib import Path
from statistics import fmean, quantiles

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from prefixfleet.cluster.model import default_cache_dir, demo_model
from prefixfleet.kernels.encoding import ENCODINGS
from prefixfleet.kernels.mover import mover_for
from prefixfleet.kernels.paged import Content, PagedLayout

BLOCK_TOKENS = 32
NUM_BLOCKS = 32
TAIL_TOKENS = 16  # of the prompt, in no full block
SCORED_TOKENS = 64
GREEDY_TOKENS = 32
NAMES = list(ENCODINGS)  # exact comes first and is what the others are held against


def prompts(tokenizer, count):
    """``count`` disjoint pieces of text, spread over all that there is."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    for package in sorted(importlib.metadata.distributions(), key=lambda d: d.metadata["Name"]):
        texts.append(str(package.metadata.json.get("description", "")))
        licences = [f.locate() for f in package.files or [] if "licen" in f.name.lower()]
        texts += [Path(f).read_text(errors="ignore") for f in licences if Path(f).is_file()]
    ids = tokenizer("\n\n".join(dict.fromkeys(texts)), verbose=False, return_tensors="pt")
    length = NUM_BLOCKS * BLOCK_TOKENS + TAIL_TOKENS + SCORED_TOKENS
    pieces = ids.input_ids[0].split(length)[:-1]
    if len(pieces) < count:
        raise SystemExit(f"quality: text for {len(pieces)} prompts here, {count} wanted")
    return [pieces[i * len(pieces) // count] for i in range(count)]


class Codec:
    """Passes a prefix's blocks through one encoding."""

    def __init__(self, encoding, config):
        heads, channels = (
            config.num_key_value_heads,
            config.hidden_size // config.num_attention_heads,
        )
        memory = torch.zeros(
            config.num_hidden_layers, NUM_BLOCKS, heads, BLOCK_TOKENS, 2 * channels
        )
        self.caches = {f"layers.{i}": layer for i, layer in enumerate(memory)}
        layout = PagedLayout.from_tensors(self.caches, content=Content.PLAIN)
        self.mover = mover_for(self.caches, layout, encoding)
        self.slots = torch.zeros(NUM_BLOCKS, self.mover.payload_bytes + 15, dtype=torch.uint8)

    def through(self, layers):
        """[(K, V)] of [1, H, T, D] a layer, decoded."""
        ids = range(NUM_BLOCKS)
        slots = [slot[-slot.data_ptr() % 16 :][: self.mover.payload_bytes] for slot in self.slots]
        for cache, (k, v) in zip(self.caches.values(), layers, strict=True):
            both = torch.cat([k, v], dim=-1)[0]
            cache.copy_(both.unflatten(1, (NUM_BLOCKS, BLOCK_TOKENS)).transpose(0, 1))
        self.mover.gather(ids, slots)
        for cache in self.caches.values():
            cache.zero_()
        self.mover.scatter(ids, slots)
        decoded = [c.transpose(0, 1).flatten(1, 2)[None] for c in self.caches.values()]
        return [both.chunk(2, dim=-1) for both in decoded]


def measure(model, codecs, tokens):
    """Figures of one prompt by encoding: KL a position, same likeliest token, greedy tokens."""
    prefix, rest = tokens[: NUM_BLOCKS * BLOCK_TOKENS], tokens[NUM_BLOCKS * BLOCK_TOKENS :]
    layers = [
        (layer.keys, layer.values)
        for layer in model(prefix[None], use_cache=True, logits_to_keep=1).past_key_values.layers
    ]
    variants = [codec.through(layers) for codec in codecs.values()]
    cache = DynamicCache()
    for i in range(len(layers)):
        keys, values = zip(*(variant[i] for variant in variants), strict=True)
        cache.update(torch.cat(keys), torch.cat(values), i)
    logits = model(rest.expand(len(variants), -1), past_key_values=cache).logits
    logs = torch.log_softmax(logits[:, TAIL_TOKENS - 1 : -1], -1)
    kl = (logs[0].exp() * (logs[0] - logs)).sum(-1).mean(1)
    same = (logs.argmax(-1) == logs[0].argmax(-1)).float().mean(1)
    answer = greedy(model, [(layer.keys, layer.values) for layer in cache.layers], logits)
    # fed with the exact answer, a variant says the same until it would say something else
    cache.crop(-SCORED_TOKENS)
    said = model(answer[:-1].expand(len(variants), -1), past_key_values=cache).logits.argmax(-1)
    said = torch.cat([logits[:, TAIL_TOKENS - 1].argmax(-1, keepdim=True), said], dim=1)
    agreed = (said == answer).long().cumprod(1).sum(1)
    return {
        name: {"kl": kl[i].item(), "top1": same[i].item(), "greedy": int(agreed[i])}
        for i, name in enumerate(codecs)
    }


def greedy(model, layers, logits):
    """[GREEDY_TOKENS] token ids after the prompt, of the first row of ``layers`` and ``logits``."""
    cache = DynamicCache()
    for i, (keys, values) in enumerate(layers):
        cache.update(keys[:1, :, :-SCORED_TOKENS], values[:1, :, :-SCORED_TOKENS], i)
    tokens = [logits[0, TAIL_TOKENS - 1].argmax()[None]]
    while len(tokens) < GREEDY_TOKENS:
        tokens.append(model(tokens[-1][None], past_key_values=cache).logits[0, -1:].argmax(-1))
    return torch.cat(tokens)


def summary(results, codecs):
    """Over all prompts, by encoding; KL in nats."""
    exact_bytes = codecs["exact"].mover.payload_bytes
    figures = {}
    for name in NAMES:
        rows = [result[name] for result in results]
        kl = [row["kl"] for row in rows]
        figures[name] = {
            "bytes_over_float32": round(codecs[name].mover.payload_bytes / exact_bytes, 4),
            "kl_mean": float(f"{fmean(kl):.3g}"),
            "kl_p99": float(f"{quantiles(kl, n=100)[98] if len(kl) > 1 else kl[0]:.3g}"),
            "same_top1": round(fmean(row["top1"] for row in rows), 4),
            "greedy_equal": round(fmean(row["greedy"] == GREEDY_TOKENS for row in rows), 4),
            "greedy_tokens_agreed": round(fmean(row["greedy"] for row in rows), 2),
        }
    return figures


def run(args):
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    folder = demo_model(default_cache_dir(), lambda text: print(text, file=sys.stderr))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    codecs = {name: Codec(name, model.config) for name in NAMES}
    wanted = {identify(tokens): tokens for tokens in prompts(tokenizer, args.prompts)}
    part, parts = args.part
    end = time.monotonic() + args.budget_s
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for name in list(wanted)[part - 1 :: parts]:
        known = read_results(args.results)
        print(f"\r{len(known.keys() & wanted)} of {args.prompts} prompts", end="", file=sys.stderr)
        if name not in known and time.monotonic() < end:
            line = json.dumps({"prompt": name, **measure(model, codecs, wanted[name])})
            with args.results.open("a") as file:  # one short write: lines of others stay whole
                file.write(line + "\n")
    known = read_results(args.results)
    return [known[name] for name in wanted if name in known], codecs


def identify(tokens):
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()


def read_results(path):
    """By prompt, of those measured with all of today's encodings."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {r["prompt"]: r for r in map(json.loads, lines) if set(NAMES) <= set(r)}


def part_of(text):
    """ "2/3" as (2, 3)."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--budget-s", type=float, default=120, help="start no prompt after that")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="K/N: one of N at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=default_cache_dir() / "quality.jsonl")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()

    results, codecs = run(args)
    if not results:
        raise SystemExit("quality: no prompt was measured; give more --budget-s")

    figures = summary(results, codecs)
    if not args.json:
        for name, row in figures.items():
            print(f"{name:12}", *(f"{key} {value:<10}" for key, value in row.items()))
    tokens = NUM_BLOCKS * BLOCK_TOKENS + TAIL_TOKENS
    print(json.dumps({"prompts": len(results), "prompt_tokens": tokens, "encodings": figures}))


if __name__ == "__main__":
    main()
