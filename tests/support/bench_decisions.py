"""Figures of the router's own thinking, without a network: view, decision, tokenising.

Times are processor time of the one thread that does it: other work on the machine is not in them.
"""

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
from prefixfleet.router.prompt import Prompt, prefix_chain, read_chat
from prefixfleet.router.rendered import Rendered
from prefixfleet.router.tokens import load_tokens
from prefixfleet.router.view import View
from prefixfleet.router.worker import Worker
from prefixfleet.store.index import IndexEvent, Membership, Snapshot
from prefixfleet.store.records import WorkerRecord

NODES = 64
CHAIN_BLOCKS = 1_024
EVENT_BLOCKS = 256
KEY, KIND = b"k" * 32, b"n" * 16
RATE = 300.0  # requests a second while events come
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
            started = time.thread_time()
            for at in range(0, len(held), EVENT_BLOCKS):
                part = tuple(held[at : at + EVENT_BLOCKS])
                view.apply(IndexEvent("publish", member, part))
            spent += time.thread_time() - started
            events += len(held)
    size = (resident_bytes() - before) / len(view)
    return view, {
        "blocks": len(view),
        "view_bytes_per_block": size,
        "ingest_alone_blocks_per_s": events / spent,
    }


def measure_rebuild(num_blocks: int) -> float:
    """Seconds to take in a snapshot."""
    rng = random.Random(2)
    members = tuple(Membership(f"n{i}", i + 1, i) for i in range(NODES))
    holders = {rng.randbytes(8): 1 << rng.randrange(NODES) for _ in range(num_blocks)}
    started = time.thread_time()
    for _ in View(time.monotonic).load(Snapshot(members, holders, "")):
        pass
    return time.thread_time() - started


def measure_decisions(view: View, folder: Path, rounds: int = 300) -> dict[str, float]:
    """Looking up and choosing among 64 workers, the chain given; and hashing the chain.

    Idle workers, of which most are alike, and for 32k also busy ones, no two of which are.
    """
    workers, idle, busy = _workers(load_tokens(folder)), Book(time.monotonic), _busy_book()
    result: dict[str, float] = {}
    for name, book in (*((name, idle) for name in PROMPTS), ("32k_busy", busy)):
        num_tokens = PROMPTS[name.removesuffix("_busy")]
        dispatcher = Dispatcher(view, book, dict, KEY, time.monotonic)
        lasted = []
        for number in range(rounds):
            chain = _held_chain(view, num_tokens, number)
            prompt = Prompt(rendered=Rendered(range(num_tokens)), tokens=num_tokens)
            started = time.thread_time()
            dispatcher.decide(prompt, {KIND: chain}, workers)
            lasted.append(1_000 * (time.thread_time() - started))
        result[f"decision_{name}_p50_ms"] = percentile(lasted, 0.5)
        result[f"decision_{name}_p99_ms"] = percentile(lasted, 0.99)
    for name, num_tokens in PROMPTS.items():
        result[f"hash_{name}_p50_ms"] = percentile(_hash_ms(num_tokens), 0.5)
    return result


def _hash_ms(num_tokens: int) -> list[float]:
    lasted = []
    for _ in range(20):
        prompt = Prompt(rendered=Rendered(range(num_tokens)), tokens=num_tokens)
        started = time.thread_time()
        prefix_chain(prompt, KIND, NAMESPACE.block_tokens, KEY)
        lasted.append(1_000 * (time.thread_time() - started))
    return lasted


def _busy_book() -> Book:
    """Every worker with one to four prefills in flight, of up to ten seconds each."""
    rng, book = random.Random(5), Book(time.monotonic)
    for number in range(NODES):
        for _ in range(rng.randrange(1, 5)):
            seconds = rng.uniform(0.1, 10.0)
            book.charge(f"w{number}", tokens=1_000, sequences=1, expected_s=seconds)
    return book


def measure_ingest(view: View, seconds: float = 2.0) -> dict[str, float]:
    """Events taken in while 300 requests a second of 32,000 tokens are decided, by one thread."""
    rng = random.Random(4)
    dispatcher = Dispatcher(view, Book(time.monotonic), dict, KEY, time.monotonic)
    workers = _workers(None)
    chain = _held_chain(view, 32_768, 0)
    prompt = Prompt(rendered=Rendered(range(32_768)), tokens=32_768)
    members = sorted(view.members.values(), key=lambda m: m.node)
    events = [
        IndexEvent("publish", rng.choice(members), tuple(rng.randbytes(8) for _ in range(256)))
        for _ in range(2_000)
    ]
    events += [IndexEvent("withdraw", event.member, event.hashes) for event in events]
    started, late_s, blocks, decided = time.thread_time(), 0.0, 0, 0
    while (now := time.thread_time() - started) < seconds:
        if now * RATE >= decided:
            late_s = max(late_s, now - decided / RATE)
            dispatcher.decide(prompt, {KIND: chain}, workers)
            decided += 1
        else:
            event = events[blocks // 256 % len(events)]
            view.apply(event)
            blocks += len(event.hashes)
    return {
        "ingest_blocks_per_s": blocks / seconds,
        "ingest_decisions_per_s": decided / seconds,
        "ingest_decision_late_ms": 1_000 * late_s,
    }


def measure_tokenising(folder: Path) -> dict[str, float]:
    """The tenth question of a chat of some 32,000 tokens: beside what was known, over nothing.

    Once a document of half the length and ten short turns about it, once ten turns of one length
    (then a tenth of the text is new, and no ratio below that can be had).
    """
    figures = _next_turn(folder, "tokenise", [16_000] + [850] * 18)
    return figures | _next_turn(folder, "tokenise_even", [1_700] * 19)


def _next_turn(folder: Path, name: str, sizes: list[int]) -> dict[str, float]:
    """``sizes`` are the tokens of the messages; the last one is the question that is timed."""
    rng = random.Random(3)
    text = " ".join(f"{rng.choice('abcdefgh')}{rng.randrange(10_000)}" for _ in range(20_000))
    known = load_tokens(folder)
    per_token = len(text) / len(known.of_text(text, add_special_tokens=False))
    messages: list[dict[str, str]] = []
    lasted = []
    for turn, size in enumerate(sizes):
        start = rng.randrange(len(text) // 2)
        content = text[start : start + int(size * per_token)]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        if turn % 2 == 0 and turn < len(sizes) - 1:
            _read_seconds(messages, known)
    for number in range(5):  # the question in five wordings: none is known
        asked = [*messages[:-1], {**messages[-1], "content": f"{number} {messages[-1]['content']}"}]
        lasted.append(_read_seconds(asked, known))
    # nothing is known of another owner's prompts, and the tokenizer is as warm
    fresh = min(_read_seconds(messages, known, owner=f"{n}") for n in range(3))
    return {
        f"{name}_full_ms": 1_000 * fresh,
        f"{name}_incremental_ms": 1_000 * min(lasted),
        f"{name}_incremental_over_full": min(lasted) / fresh,
        f"{name}_new_share": sum(sizes[-2:]) / sum(sizes),
    }


def _read_seconds(messages: list[dict[str, str]], tokens: Any, owner: str = "") -> float:
    body = read_body(json.dumps({"model": "tiny", "messages": messages}).encode())
    started = time.thread_time()
    prompt = read_chat(body, tokens, owner)
    prefix_chain(prompt, KIND, NAMESPACE.block_tokens, KEY)
    return time.thread_time() - started


def _held_chain(view: View, num_tokens: int, number: int) -> list[bytes]:
    """A chain of which three nodes hold different leading parts."""
    rng = random.Random(number)
    chain = [rng.randbytes(16) for _ in range(num_tokens // NAMESPACE.block_tokens)]
    for member in rng.sample(sorted(view.members.values(), key=lambda m: m.node), 3):
        held = chain[: rng.randrange(1, len(chain))]
        view.apply(IndexEvent("publish", member, tuple(held)))
    return chain


def _workers(tokens: Any) -> list[Worker]:
    return [Worker(_record(i), tokens, KIND, NAMESPACE.block_tokens) for i in range(NODES)]


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
    figures |= measure_decisions(view, folder) | measure_ingest(view)
    figures |= measure_tokenising(folder)
    del view
    rebuild_s = measure_rebuild(num_blocks)
    size = f"{num_blocks // 1_000_000}m" if num_blocks >= 1_000_000 else f"{num_blocks}"
    return figures | {f"rebuild_{size}_s": rebuild_s}
