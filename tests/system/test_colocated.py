"""Two models on every node of a fleet, one memory for both: `prefixfleet up --colocate`."""

import json
import os
import subprocess
import sys
import uuid

import openai
import pytest
from engines import wait_until
from tiny_model import write_tiny_model

from prefixfleet.cluster.model import default_cache_dir, demo_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TEXT = "Every node keeps the blocks that it computed, and an index knows who has which. " * 12
LAYERS = {"small": 3, "large": 5}


def prefixfleet(environ, *arguments):
    command = [sys.executable, "-m", "prefixfleet.cluster", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def environ(tmp_path):
    own = {"XDG_STATE_HOME": str(tmp_path), "PREFIXFLEET_FLEET": f"test-{uuid.uuid4().hex[:8]}"}
    pool = {"PREFIXFLEET_NODE_POOL_BYTES": str(256 << 20)}
    environ = os.environ | own | pool | {"PREFIXFLEET_WORKER_KV_CACHE_BYTES": str(256 << 20)}
    yield environ
    prefixfleet(environ, "down")


def stats_of_the_node(environ):
    (node,) = json.loads(prefixfleet(environ, "status", "--json"))["nodes"]
    return node["stats"]


def test_two_models_share_a_nodes_memory_and_each_finds_its_own_prefixes(environ, tmp_path):
    tokenizer = demo_model(default_cache_dir(), lambda _: None)
    folders = {name: write_tiny_model(tmp_path / name, tokenizer, n) for name, n in LAYERS.items()}
    named = [word for folder in folders.values() for word in ("--model", str(folder))]

    url = prefixfleet(
        environ, "up", "--nodes", "1", "--port", "0", "--colocate", *named, "--detach"
    )

    with openai.OpenAI(base_url=url.strip(), api_key="none", timeout=100) as client:

        def ask(model, **options):
            raw = client.completions.with_raw_response.create(
                model=model, prompt=TEXT, max_tokens=8, temperature=0.0, **options
            )
            return raw.parse().choices[0].text, int(raw.headers["x-prefixfleet-hit-tokens"])

        def found(model):
            text, hit_tokens = ask(model)
            assert text == cold[model]
            return hit_tokens > 0

        assert {model.id for model in client.models.list()} == set(LAYERS)
        cold = {name: ask(name, extra_body={"cache_salt": "alone"})[0] for name in LAYERS}
        wait_until(lambda: all(found(name) for name in LAYERS))

    def both_hold_blocks():
        """As the node said in its latest record, a second or two ago."""
        kinds = stats_of_the_node(environ)["kinds"].values()
        return [kind["resident"] > 0 for kind in kinds] == [True] * len(LAYERS)

    wait_until(both_hold_blocks)
    stats = stats_of_the_node(environ)
    assert stats["engines"] == len(LAYERS)
    assert len({kind["slot_bytes"] for kind in stats["kinds"].values()}) == len(LAYERS)
