"""Which adapters a worker announces, and that their digests are those of the connector."""

import asyncio
from dataclasses import dataclass

import pytest
from eventually import until

from prefixfleet.cluster import worker_adapters
from prefixfleet.cluster.connector_identity import AdapterDigests
from prefixfleet.cluster.worker_adapters import WorkerAdapters
from prefixfleet.store.errors import ProtocolError


@dataclass
class Lora:
    """What vLLM knows of an adapter in a request."""

    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "sql"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


class Engine:
    def __init__(self, **roots):
        self.roots = {name: str(root) for name, root in roots.items()}

    async def __call__(self):
        if self.roots is None:
            raise ProtocolError("nothing to be had")
        return self.roots


async def test_the_digest_is_the_one_by_which_the_connector_names_its_blocks(folder, tmp_path):
    """Else the router would look for prefixes that nobody holds."""
    adapters = WorkerAdapters(Engine(sql=folder), tmp_path / "cache")

    await adapters.look()

    connector = AdapterDigests(tmp_path / "its cache")
    assert adapters.found == {"sql": connector(Lora("sql", str(folder)))}


async def test_what_the_connector_does_not_store_has_no_digest(folder, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    roots = {"hub": "org/adapter", "bare": "", "empty": tmp_path / "empty", "sql": folder}
    adapters = WorkerAdapters(Engine(**roots), tmp_path / "cache")

    await adapters.look()

    assert [name for name, digest in adapters.found.items() if digest] == ["sql"]
    assert set(adapters.found) == set(roots)
    assert "'org/adapter' is no folder here" in caplog.text


async def test_changed_files_have_another_digest(folder, tmp_path):
    adapters = WorkerAdapters(Engine(sql=folder), tmp_path / "cache")
    await adapters.look()
    before = adapters.found["sql"]

    (folder / "adapter_model.safetensors").write_bytes(b"other weights")
    await adapters.look()

    assert adapters.found["sql"] not in ("", before)


async def test_what_cannot_be_asked_stays_and_is_said_once(folder, tmp_path, caplog):
    engine = Engine(sql=folder)
    adapters = WorkerAdapters(engine, tmp_path / "cache")
    await adapters.look()

    engine.roots = None
    for _ in range(3):
        await adapters.look()

    assert list(adapters.found) == ["sql"]
    assert caplog.text.count("nothing to be had") == 1


async def test_no_more_than_a_bound_are_announced(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_adapters, "MAX_ADAPTERS", 2)
    adapters = WorkerAdapters(Engine(c=folder, b=folder, a=folder), tmp_path / "cache")

    await adapters.look()

    assert list(adapters.found) == ["a", "b"]
    assert "3 adapters, only 2" in caplog.text


async def test_what_comes_and_goes_is_seen_and_a_fault_ends_nothing(
    folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(worker_adapters, "LOOK_S", 0.01)
    engine = Engine()
    adapters = WorkerAdapters(engine, tmp_path / "cache")
    looking = asyncio.create_task(adapters.run())

    engine.roots = {"sql": 7}  # no text: a fault
    await until(lambda: "a fault of the worker" in caplog.text)
    engine.roots = {"sql": str(folder)}
    await until(lambda: adapters.found)
    engine.roots = {}
    await until(lambda: not adapters.found)

    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
