"""The digest of weights follows their contents, and nothing else."""

import json
import os

import pytest

from prefixfleet.cluster.weights import weights_digest
from prefixfleet.store.errors import ConfigError


def model(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"config.json": b"{}", "a.safetensors": b"one", "b.safetensors": b"two"} | files
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "change",
    [
        {"a.safetensors": b"onf"},
        {"config.json": b"[]"},
        {"c.bin": b""},
        {"a.safetensors": b"onet", "b.safetensors": b"wo"},
    ],
)
def test_any_change_of_weights_or_configuration_is_another_digest(tmp_path, cache, change):
    base = weights_digest(model(tmp_path / "m"), cache)

    assert weights_digest(model(tmp_path / "n", **change), cache) != base


def test_a_changed_file_is_read_again(tmp_path, cache):
    folder = model(tmp_path / "m")
    base = weights_digest(folder, cache)
    stat = (folder / "a.safetensors").stat()

    (folder / "a.safetensors").write_bytes(b"ONE")
    os.utime(folder / "a.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert weights_digest(folder, cache) != base


def test_tokenizer_readme_and_place_do_not_count(tmp_path, cache):
    base = weights_digest(model(tmp_path / "m"), cache)
    extra = {"tokenizer.json": b"t", "README.md": b"r"}

    assert weights_digest(model(tmp_path / "else" / "n", **extra), cache) == base


def test_unchanged_files_are_not_read_again(tmp_path, cache):
    folder = model(tmp_path / "m")
    weights_digest(folder, cache)
    (kept,) = (cache / "weights").iterdir()
    known = json.loads(kept.read_text())
    kept.write_text(json.dumps(known | {"digest": "from the cache"}))

    assert weights_digest(folder, cache) == "from the cache"


@pytest.mark.parametrize("junk", ["", "[]", "{}", '{"files": 3, "digest": "x"}'])
def test_a_damaged_cache_is_made_again(tmp_path, cache, junk):
    folder = model(tmp_path / "m")
    base = weights_digest(folder, cache)
    (kept,) = (cache / "weights").iterdir()
    kept.write_text(junk)

    assert weights_digest(folder, cache) == base


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("")

    assert weights_digest(model(tmp_path / "m"), tmp_path / "file")


def test_one_file_can_be_the_model(tmp_path, cache):
    folder = model(tmp_path / "m", **{"model.gguf": b"g"})

    alone = weights_digest(folder / "model.gguf", cache)

    assert alone != weights_digest(folder, cache)


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path, cache, folder):
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=folder):
        weights_digest(tmp_path / folder, cache)
