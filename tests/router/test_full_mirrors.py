"""A plain engine of more blocks than are followed: seen, and routed by what is known of it."""

import pytest
from engine_publisher import EnginePublisher, removed
from eventually import until
from static_entries import entry, write

from prefixfleet.store import engine_mirror

LONG = "The prefix cache keeps what a node computed before. " * 20


@pytest.fixture
def path(tmp_path):
    return tmp_path / "workers.json"


async def test_an_engine_of_too_many_blocks_is_degraded_and_still_found(rig, path, monkeypatch):
    monkeypatch.setattr(engine_mirror, "MAX_COPIES", 4)
    async with EnginePublisher() as publisher:
        engine = await rig.engine("a", plain=True)
        await rig.start(records=[], ready=1, workers_file=write(path, entry(engine, publisher)))
        await publisher.heard()
        ids = engine.tokens.of_text(LONG)
        await publisher.publish(publisher.stored(ids))

        (mode,) = await until(  # a Redis that is slow for a moment is another one
            lambda: [m for m in rig.router.degraded.modes() if m.name == "events of a"]
        )
        assert f"{len(ids) // 16 - 4} were left out" in mode.reason
        assert len(rig.router.engines.view) == 4
        _, headers, _ = await rig.post(prompt=LONG)
        assert headers["x-prefixfleet-hit-tokens"] == "64"
        async with rig.client.get("/metrics") as response:
            metrics = await response.text()
        assert 'prefixfleet_engine_event_losses{kind="overflows",worker="a"} 1.0' in metrics

        await publisher.publish(removed(0, 1))
        await until(lambda: not rig.router.degraded.modes())
        assert len(rig.router.engines.view) == 2
