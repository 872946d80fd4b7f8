"""Figures of the router's own thinking, without a network: view, decision, tokenising."""

import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_client import percentile
from bench_upstream import NAMESPACE
from chats import write_model

from prefixfleet.router.body import read_body
from prefixfleet.router.book import Book
from prefixfleet.router.dispatch import Dispatcher
from prefixfleet.router.known_prefixes import Rendered
from prefixfleet.router.prompt import Prompt, prefix_chain, read_chat
from prefixfleet.router.tokens import load_tokens
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.index import IndexEvent, Membership, Snapshot
from prefixfleet.store.records import WorkerRecord

NODES = 64
CHAIN_BLOCKS = 1_024
EVENT_BLOCKS = 256
KEY, KIND = b"k" * 32, b"n" * 16
PROMPTS = {"2k": 2_048, "32k": 32_768, "128k": 131_072}


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_view(num_blocks: int) -> tuple[View, dict[str, float]]:
    """A view of ``num_blocks`` in chains of 1,024 with one to four holders each."""
    rng = random.Random(1)
    members = [Membership(f"n{i}", i + 1, i) for i in range(NODES)]
    view = View(time.monotonic)
    for member in members:
        view.apply(IndexEvent("join", member))
    spent, events, before = 0.0, 0, resident_bytes()
    for _ in range(num_blocks // CHAIN_BLOCKS):
        chain = [rng.randbytes(8) for _ in range(CHAIN_BLOCKS)]
        for turn in range(rng.randrange(1, 5)):
            held = chain[: rng.randrange(1, CHAIN_BLOCKS) if turn else CHAIN_BLOCKS]
            member = rng.choice(members)
            started = time.perf_counter()
            for at in range(0, len(held), EVENT_BLOCKS):
                part = tuple(held[at : at + EVENT_BLOCKS])
                view.apply(IndexEvent("publish", member, part))
            spent += time.perf_counter() - started
            events += len(held)
    size = (resident_bytes() - before) / len(view)
    return view, {
        "blocks": len(view),
        "view_bytes_per_block": size,
        "ingest_blocks_per_s": events / spent,
    }


def measure_rebuild(num_blocks: int) -> dict[str, float]:
    """Seconds to take in a snapshot."""
    rng = random.Random(2)
    members = tuple(Membership(f"n{i}", i + 1, i) for i in range(NODES))
    holders = {rng.randbytes(8): 1 << rng.randrange(NODES) for _ in range(num_blocks)}
    started = time.perf_counter()
    for _ in View(time.monotonic).load(Snapshot(members, holders, "")):
        pass
    return {"rebuild_s": time.perf_counter() - started}


def measure_decisions(view: View, folder: Path, rounds: int = 300) -> dict[str, float]:
    """Looking up and choosing among 64 workers, the chain given; and hashing the chain."""
    tokens = load_tokens(folder)
    book = Book(time.monotonic)
    dispatcher = Dispatcher(view, book, dict, KEY, time.monotonic)
    workers = [Worker(_record(i), tokens, KIND, NAMESPACE.block_tokens) for i in range(NODES)]
    result: dict[str, float] = {}
    for name, num_tokens in PROMPTS.items():
        lasted, hashed = [], []
        for number in range(rounds):
            chain = _held_chain(view, dispatcher, num_tokens, number)
            prompt = Prompt(rendered=Rendered(range(num_tokens)), tokens=num_tokens)
            started = time.perf_counter()
            dispatcher.decide(prompt, {KIND: chain}, workers)
            lasted.append(1_000 * (time.perf_counter() - started))
            if number < 20:
                started = time.perf_counter()
                prefix_chain(prompt, KIND, NAMESPACE.block_tokens, KEY)
                hashed.append(1_000 * (time.perf_counter() - started))
        result[f"decision_{name}_p50_ms"] = percentile(lasted, 0.5)
        result[f"decision_{name}_p99_ms"] = percentile(lasted, 0.99)
        result[f"hash_{name}_p50_ms"] = percentile(hashed, 0.5)
    return result


def measure_tokenising(folder: Path, turns: int = 10, turn_tokens: int = 3_200) -> dict[str, float]:
    """Turn ``turns`` of a chat of some 32,000 tokens: with what was known, and from nothing."""
    rng = random.Random(3)
    words = [f"{rng.choice('abcdefgh')}{rng.randrange(10_000)}" for _ in range(2_000)]
    text = " ".join(words)
    size = len(load_tokens(folder).of_text(text, add_special_tokens=False)) / len(text)
    per_turn = int(turn_tokens / size)
    messages: list[dict[str, str]] = []
    known = load_tokens(folder)
    lasted = 0.0
    for turn in range(2 * turns - 1):
        start = rng.randrange(len(text))
        content = (text[start:] + text * (1 + per_turn // len(text)))[: per_turn // 2]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        if turn % 2 == 0:
            lasted = _read_seconds(messages, known)
    fresh = min(_read_seconds(messages, load_tokens(folder)) for _ in range(3))
    return {
        "tokenise_full_ms": 1_000 * fresh,
        "tokenise_next_turn_ms": 1_000 * lasted,
        "tokenise_next_over_full": lasted / fresh,
    }


def _read_seconds(messages: list[dict[str, str]], tokens: Any) -> float:
    body = read_body(json.dumps({"model": "tiny", "messages": messages}).encode())
    started = time.perf_counter()
    prompt = read_chat(body, tokens)
    prefix_chain(prompt, KIND, NAMESPACE.block_tokens, KEY)
    return time.perf_counter() - started


def _held_chain(view: View, dispatcher: Dispatcher, num_tokens: int, number: int) -> list[bytes]:
    """A chain of which three nodes hold different leading parts."""
    rng = random.Random(number)
    chain = [rng.randbytes(16) for _ in range(num_tokens // NAMESPACE.block_tokens)]
    for member in rng.sample(sorted(view.members.values(), key=lambda m: m.node), 3):
        held = chain[: rng.randrange(1, len(chain))]
        view.apply(IndexEvent("publish", member, tuple(held)))
    return chain


def _record(number: int) -> WorkerRecord:
    return WorkerRecord(
        worker=f"w{number}",
        node=f"n{number}",
        url="http://127.0.0.1:1",
        model="tiny",
        model_path="",
        namespace=asdict(NAMESPACE),
        block_bytes=1 << 20,
        max_model_tokens=200_000,
        prefill_tokens_per_s=10_000.0,
    )


def measure_all(work: Path, num_blocks: int) -> dict[str, float]:
    """Everything in this file."""
    folder = write_model(work / "thinking")
    view, figures = measure_view(num_blocks)
    figures |= measure_decisions(view, folder)
    return figures | measure_rebuild(num_blocks) | measure_tokenising(folder)
