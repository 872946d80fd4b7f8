"""``prefixfleet replay``: a trace against a live OpenAI endpoint, open loop, with a report.

Open loop: a request is sent when the trace says so, whether or not earlier ones have ended; a
closed loop would slow down with the server and hide its queue.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from prefixfleet.router.arguments import MAX_REQUESTS, count, positive
from prefixfleet.router.last_words import check_targets, complain, ended, tell, write_all
from prefixfleet.router.replay_client import Sample, request_body, send
from prefixfleet.router.replay_report import render_html
from prefixfleet.router.replay_run import load_run
from prefixfleet.router.replay_stats import summarise
from prefixfleet.router.synthetic_prompts import scale, text_prompt, token_prompt
from prefixfleet.router.traces import Arrival, SharedBlocks, read_trace
from prefixfleet.store.errors import ConfigError

TOKEN_IDS = range(1000, 20_000)
"""Ids that every vocabulary in use has as ordinary text; synthetic prompts are drawn from them."""


def schedule(arrivals: Sequence[Arrival], *, speed: float, rate: float | None) -> list[float]:
    """When each request is due, in seconds: the trace's times sped up, or a fixed rate a second."""
    if rate is not None:
        return [i / rate for i in range(len(arrivals))]
    return [arrival.at_s / speed for arrival in arrivals]


def prompt_of(arrival: Arrival, *, length: float, style: str, seed: int) -> dict[str, Any]:
    """The part of a request body that carries the prompt."""
    if not isinstance(arrival.prompt, SharedBlocks):
        return arrival.prompt
    blocks = scale(arrival.prompt, length)
    if style == "tokens":
        return {"prompt": token_prompt(blocks, TOKEN_IDS, seed)}
    return {"messages": [{"role": "user", "content": text_prompt(blocks, seed)}]}


async def replay(
    arrivals: Sequence[Arrival],
    options: argparse.Namespace,
    progress: Progress,
    seen: dict[int, Sample] | None = None,
) -> tuple[list[Sample], float]:
    """Samples in the trace's order and the seconds it took. ``seen`` gets each as soon as its
    request has ended, by its number: what is left of a replay that was cancelled."""
    seen = {} if seen is None else seen
    base = options.endpoint.rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)  # a limit would queue inside the client
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        model = options.model or await first_model(session, base)
        due = schedule(arrivals, speed=options.speed, rate=options.rate)
        bar = progress.add_task("replaying", total=len(arrivals))
        started = time.monotonic()

        async def one(number: int, arrival: Arrival, due_s: float) -> None:
            prompt = prompt_of(
                arrival, length=options.length, style=options.prompts, seed=options.seed
            )
            output = round(arrival.output_tokens * options.length)
            path, body = request_body(prompt, model=model, output_tokens=output)
            seen[number] = await send(
                session, base + path, body,
                started=started, due_s=due_s, timeout_s=options.timeout,
            )  # fmt: skip
            progress.advance(bar)

        async with asyncio.TaskGroup() as running:  # cancelled, it cancels what is in flight
            for number, (arrival, due_s) in enumerate(zip(arrivals, due, strict=True)):
                # begun when due: a trace is long
                await asyncio.sleep(max(0.0, started + due_s - time.monotonic()))
                running.create_task(one(number, arrival, due_s))
        return [seen[number] for number in sorted(seen)], time.monotonic() - started


async def until_interrupted(
    arrivals: Sequence[Arrival], options: argparse.Namespace, progress: Progress
) -> tuple[list[Sample], float, bool]:
    """As `replay`; after Ctrl-C, which cancels this, what had ended by then, and True."""
    seen: dict[int, Sample] = {}
    began = time.monotonic()
    try:
        return *await replay(arrivals, options, progress, seen), False
    except asyncio.CancelledError:
        return [seen[number] for number in sorted(seen)], time.monotonic() - began, True


async def first_model(session: aiohttp.ClientSession, base: str) -> str:
    """The first model the endpoint lists. Raises `ConfigError` if it lists none."""
    try:
        async with session.get(f"{base}/models", timeout=aiohttp.ClientTimeout(10)) as answer:
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"endpoint {base}: cannot list its models ({type(error).__name__}: {error}); "
            "is it an OpenAI endpoint, and does it run? --model names one without asking"
        ) from error


def parser() -> argparse.ArgumentParser:
    """Command line of the replay."""
    p = argparse.ArgumentParser(prog="prefixfleet replay", description=__doc__.splitlines()[0])
    p.add_argument("--trace", type=Path, required=True, help="Mooncake, Qwen-Bailian or OpenAI log")
    p.add_argument("--endpoint", required=True, help="base URL, e.g. http://127.0.0.1:8000")
    p.add_argument("--model", help="served name; default: the first that the endpoint lists")
    p.add_argument("--api-key", default="", help="sent as Bearer token")
    p.add_argument("--speed", type=positive, default=1.0, help="2 replays twice as fast")
    p.add_argument("--rate", type=positive, help="requests a second instead of the trace's times")
    p.add_argument(
        "--length", type=positive, default=1.0, help="factor on prompt and answer lengths"
    )
    p.add_argument("--limit", type=count(MAX_REQUESTS), help="only the first N requests")
    p.add_argument("--prompts", choices=("tokens", "text"), default="text")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--timeout", type=positive, default=600.0, help="seconds for one request")
    p.add_argument("--ttft-slo", type=positive, default=30.0, help="seconds")
    p.add_argument("--tbt-slo", type=positive, default=0.3, help="seconds")
    p.add_argument("--out", type=Path, help="write figures and samples to FILE (JSON)")
    p.add_argument("--html", type=Path, help="write a one-page report")
    p.add_argument("--compare", type=Path, help="--out file of another run, shown beside this one")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the replay; 0 if no request failed, 1 if some did or a file could not be written, 2 for
    wrong arguments or files, 130 if it was interrupted: then of what had ended."""
    return ended("replay", partial(_replay, parser().parse_args(argv)))


def _replay(options: argparse.Namespace) -> int:
    check_targets({"--out": options.out, "--html": options.html})
    other = [load_run(options.compare)] if options.compare else []
    arrivals = read_trace(options.trace, limit=options.limit)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        samples, wall_s, cut = asyncio.run(until_interrupted(arrivals, options, progress))
    figures = summarise(
        samples, wall_s=wall_s, ttft_slo_s=options.ttft_slo, tbt_slo_s=options.tbt_slo
    )
    figures |= {"cut_short": cut, "requests_in_trace": len(arrivals)}
    run = {"trace": options.trace.name, "endpoint": options.endpoint, "figures": figures}
    run["samples"] = [asdict(sample) for sample in samples]
    files: dict[Path, Callable[[], str]] = {}
    if options.out:
        files[options.out] = lambda: json.dumps(run)
    if options.html:
        files[options.html] = lambda: render_html([run, *other])
    written = write_all("replay", files)
    tell(json.dumps(figures) + "\n")
    if cut:
        complain("replay", f"interrupted: {len(samples)} of {len(arrivals)} requests had ended")
        return 130
    return 0 if written and not figures["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())
