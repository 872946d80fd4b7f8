"""Faults of other routers that no other test here covers; see tests/FAULTS.md."""

import gc

from eventually import until

from prefixfleet.router.decision import Candidate
from prefixfleet.router.estimate import first_guess
from prefixfleet.router.policy import choose

LONG = "The prefix cache keeps what a node computed before. " * 20


def candidate(worker, hit_blocks, busy_s):
    """A worker that prefills 1,000 tokens a second in blocks of 16."""
    return Candidate(
        worker=worker,
        node=f"node-{worker}",
        hit_blocks=hit_blocks,
        queued_tokens=int(1_000 * busy_s),
        queued_requests=1 if busy_s else 0,
        busy_s=busy_s,
        prefill=first_guess(1_000.0),
        block_tokens=16,
        block_bytes=1_000,
    )


def test_a_prefix_still_counts_when_loads_differ():
    """sglang 32195: with any imbalance the prefix was ignored altogether."""
    idle = candidate("idle", hit_blocks=0, busy_s=0.0)
    for busy_s in (0.1, 0.5, 0.9):
        holder = candidate("holder", hit_blocks=62, busy_s=busy_s)
        assert choose(1_000, [idle, holder], lambda n: 0).worker == "holder"

    overloaded = candidate("holder", hit_blocks=62, busy_s=5.0)
    assert choose(1_000, [idle, overloaded], lambda n: 0).worker == "idle"


async def test_a_holder_that_may_get_nothing_does_not_hide_free_workers(rig):
    """dynamo 9655: overloaded workers were taken out after the choice, and 503 was the answer."""
    holder, free = [await rig.engine(name) for name in "ab"]
    router = await rig.start(holder, free)
    await rig.holds(holder, holder.tokens.of_text(LONG))
    await rig.holds(free, [])
    await rig.announce(holder.record(state="draining"))
    await until(lambda: {s.state for s in router.roster.standings()} == {"draining", "ready"})

    status, headers, _ = await rig.post(prompt=LONG)

    assert (status, headers["x-prefixfleet-node"]) == (200, "node-b")


def forget(engine):
    """What the test's own engine keeps of requests."""
    for kept in (engine.seen, engine.raw, engine.seen_headers, engine.paths):
        kept.clear()


async def test_unique_prompts_leave_nothing_behind(rig, monkeypatch):
    """dynamo 10774 and four more: an index or a map a request that only grows."""
    # what is kept of a fixed number of the last requests is full before the first look
    monkeypatch.setattr("prefixfleet.router.activity.KEPT_DECISIONS", 10)
    monkeypatch.setattr("prefixfleet.router.hot_prefixes.MAX_ENTRIES", 10)
    engine = await rig.engine()
    router = await rig.start(engine)

    def kept():
        """Everything that the router has a reference to, counted by type."""
        gc.collect()
        counts = {}
        for thing in gc.get_objects():
            name = str(type(thing).__module__)
            if name.startswith("prefixfleet.router"):
                kind = f"{name}.{type(thing).__qualname__}"
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    for number in range(50):
        await rig.post(prompt=f"{number} {LONG}")
    forget(engine)
    before = kept()
    for number in range(50, 350):
        await rig.post(prompt=f"{number} {LONG}")
    forget(engine)
    after = kept()

    assert router.book.workers() == []
    assert len(router.turns) == 0
    assert router.in_flight == 0
    grown = {kind: after[kind] - before.get(kind, 0) for kind in after}
    assert {kind: count for kind, count in grown.items() if count > 50} == {}


async def test_tools_without_parameters_are_the_engines_affair(rig):
    """vllm-router 275: validated again, and refused with 422."""
    engine = await rig.engine()
    await rig.start(engine)
    tools = [{"type": "function", "function": {"name": "now"}}]

    status, _, _ = await rig.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "what time is it?"}],
        tools=tools,
    )

    assert status == 200
    assert engine.seen[0]["tools"] == tools
