"""Which adapters a worker announces, and that their digests are those of the connector."""

import asyncio
from dataclasses import dataclass

import pytest
from eventually import until

from prefixfleet.cluster import worker_adapters
from prefixfleet.cluster.adapter_digests import AdapterDigests
from prefixfleet.cluster.worker_adapters import WorkerAdapters
from prefixfleet.store.errors import ConfigError, ProtocolError


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
        self.greeted = []
        self.answers = True

    async def __call__(self):
        if self.roots is None:
            raise ProtocolError("nothing to be had")
        return self.roots

    async def greet(self, name):
        self.greeted.append(name)
        if not self.answers:
            raise ProtocolError("no answer")


def adapters_of(engine, tmp_path):
    return WorkerAdapters(engine, engine.greet, tmp_path / "cache")


async def test_the_digest_is_the_one_by_which_the_connector_names_its_blocks(folder, tmp_path):
    """Else the router would look for prefixes that nobody holds."""
    adapters = adapters_of(Engine(sql=folder), tmp_path)

    await adapters.look()

    connector = AdapterDigests(tmp_path / "its cache")
    assert adapters.found == {"sql": connector(Lora("sql", str(folder)))}


async def test_what_the_connector_does_not_store_has_no_digest(folder, tmp_path, caplog):
    (tmp_path / "empty").mkdir()
    roots = {"hub": "org/adapter", "bare": "", "empty": tmp_path / "empty", "sql": folder}
    adapters = adapters_of(Engine(**roots), tmp_path)

    await adapters.look()

    assert [name for name, digest in adapters.found.items() if digest] == ["sql"]
    assert set(adapters.found) == set(roots)
    assert "'org/adapter' is no folder here" in caplog.text


async def test_files_that_changed_under_an_engine_are_named_by_nobody_until_loaded_again(
    folder, tmp_path, caplog
):
    """The engine has the files before, or has read these: nobody can tell."""
    engine = Engine(sql=folder)
    adapters, connector = adapters_of(engine, tmp_path), AdapterDigests(tmp_path / "its cache")
    await adapters.look()
    before = adapters.found["sql"]
    assert connector(Lora("sql", str(folder))) == before

    (folder / "adapter_model.safetensors").write_bytes(b"other weights")
    for _ in range(2):
        await adapters.look()
        with pytest.raises(ConfigError, match="have changed"):
            connector(Lora("sql", str(folder)))
    assert adapters.found == {"sql": ""}
    assert caplog.text.count("have changed") == 1

    engine.roots = {}
    await adapters.look()
    engine.roots = {"sql": str(folder)}
    await adapters.look()
    assert adapters.found == {"sql": connector(Lora("sql", str(folder), lora_int_id=2))}
    assert adapters.found["sql"] not in ("", before)


async def test_files_that_came_back_are_not_believed_to_be_what_the_engine_has(folder, tmp_path):
    connector, weights = AdapterDigests(tmp_path), folder / "adapter_model.safetensors"
    lora = Lora("sql", str(folder))
    digest = connector(lora)
    weights.touch()
    assert connector(lora) == digest

    for content in (b"other weights", b"weights"):
        weights.write_bytes(content)
        with pytest.raises(ConfigError, match="have changed"):
            connector(lora)


async def test_a_number_whose_adapter_was_replaced_in_place_is_named_no_more(folder, tmp_path):
    """Requests that run go on with the new weights."""
    connector, running = AdapterDigests(tmp_path), Lora("sql", str(folder))
    assert connector(running)

    with pytest.raises(ConfigError, match="in place"):
        connector(Lora("sql", str(tmp_path), load_inplace=True))

    with pytest.raises(ConfigError):
        connector(running)
    assert connector(Lora("sql", str(folder), lora_int_id=2))


async def test_a_new_adapter_is_greeted_once_so_that_the_connector_sees_its_files(folder, tmp_path):
    engine = Engine(sql=folder, law=folder)
    adapters = adapters_of(engine, tmp_path)
    engine.answers = False
    await adapters.look()
    engine.answers = True
    for _ in range(2):
        await adapters.look()
    assert sorted(engine.greeted) == ["law", "law", "sql", "sql"]

    engine.roots = {"sql": str(folder)}
    await adapters.look()
    engine.roots = {"sql": str(folder), "law": str(folder)}
    await adapters.look()
    assert engine.greeted[4:] == ["law"]


async def test_what_cannot_be_asked_stays_and_is_said_once(folder, tmp_path, caplog):
    engine = Engine(sql=folder)
    adapters = adapters_of(engine, tmp_path)
    await adapters.look()

    engine.roots = None
    for _ in range(3):
        await adapters.look()

    assert list(adapters.found) == ["sql"]
    assert caplog.text.count("nothing to be had") == 1


async def test_several_faults_are_each_said_once(tmp_path, caplog):
    adapters = adapters_of(Engine(hub="org/adapter", bare=""), tmp_path)

    for _ in range(3):
        await adapters.look()

    assert caplog.text.count("is no folder here") == 2


async def test_no_more_than_a_bound_are_announced(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker_adapters, "MAX_ADAPTERS", 2)
    adapters = adapters_of(Engine(c=folder, b=folder, a=folder), tmp_path)

    await adapters.look()

    assert list(adapters.found) == ["a", "b"]
    assert "3 adapters, only 2" in caplog.text


async def test_what_comes_and_goes_is_seen_and_a_fault_ends_nothing(
    folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(worker_adapters, "LOOK_S", 0.01)
    engine = Engine()
    adapters = adapters_of(engine, tmp_path)
    looking = asyncio.create_task(adapters.run())

    engine.roots = {"sql": 7}  # no text: a fault
    await until(lambda: "a fault of the worker" in caplog.text)
    engine.roots = {"sql": str(folder)}
    await until(lambda: adapters.found)
    engine.roots = {}
    await until(lambda: not adapters.found)

    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
