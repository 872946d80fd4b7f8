"""The storage against SGLang's own interface and factory, where its package is installed."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from daemons import Daemons
from host_pools import PageFirstPool, indices_of, keys_of

from prefixfleet.store.errors import ConfigError

storage = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
factory = pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory")
pytest.importorskip("sglang.srt.runtime_context")

SETTINGS = "prefixfleet.cluster.sglang_backend.get_lora"
"""SGLang's; to publish them takes all of its dependencies."""


def adapters(*, enabled):
    return lambda: SimpleNamespace(enable_lora=enabled)


@pytest.fixture
def make(tmp_path, tmp_path_factory, monkeypatch, redis_url, fleet):
    """Storages as the engine's controller makes them, for one node."""
    monkeypatch.setenv("PREFIXFLEET_REDIS_URL", redis_url)
    monkeypatch.setenv("PREFIXFLEET_FLEET", fleet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(SETTINGS, adapters(enabled=False))
    made = []
    with Daemons(tmp_path_factory.mktemp("n")) as daemons:
        socket = daemons.start()

        def of(rank=0, ranks=1, mla=False, **extra):
            config = storage.HiCacheStorageConfig(
                tp_rank=rank,
                tp_size=ranks,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
                is_mla_model=mla,
                enable_storage_metrics=False,
                is_page_first_layout=True,
                model_name="m",
                extra_config={
                    "backend_name": "prefixfleet",
                    "module_path": "prefixfleet.cluster.sglang_backend",
                    "class_name": "PrefixfleetStorage",
                    "interface_v1": 1,
                    "socket": str(socket),
                    "model_path": str(tmp_path),
                    **extra,
                },
            )
            pool = PageFirstPool()
            one = factory.StorageBackendFactory.create_backend("dynamic", config, pool)
            one.register_mem_pool_host(pool)
            made.append(one)
            return one, pool

        yield of
        for one in made:
            one.close()


def test_the_factory_makes_it_and_pages_travel_between_engines(make):
    (first, pool), (second, other) = make(), make()
    keys = keys_of("doc", 4)
    values = [pool.fill(page, page) for page in range(4)]
    info = storage.HiCacheStorageExtraInfo(prefix_keys=[])

    assert isinstance(first, storage.HiCacheStorage)
    assert first.batch_exists(keys, info) == 0
    assert first.batch_set_v1(keys, indices_of(0, 1, 2, 3), info) == [True] * 4
    assert second.batch_exists(keys, info) == 4
    assert second.batch_get_v1(keys, indices_of(5, 6, 7, 8), info) == [True] * 4

    for page, value in enumerate(values):
        assert torch.equal(other.memory[5 + page], value)


def test_every_method_takes_what_the_interface_gives(make):
    one, _ = make()
    for name in ("batch_exists", "batch_get_v1", "batch_set_v1"):
        theirs = inspect.signature(getattr(storage.HiCacheStorage, name))
        ours = inspect.signature(getattr(type(one), name))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_the_interface_before_chains_is_a_miss(make):
    one, _ = make()

    assert one.get("k") is None
    assert one.batch_get(["k"], [torch.zeros(1)]) == [None]
    assert not one.set("k", torch.zeros(1))
    assert not one.batch_set(["k"], [torch.zeros(1)])
    assert not one.exists("k")


def test_one_rank_writes_a_latent_cache(make):
    (writer, pool), (reader, _) = make(0, 2, mla=True), make(1, 2, mla=True)
    keys = keys_of("doc", 2)
    pool.fill(0, 1)
    pool.fill(1, 2)

    assert reader.batch_set_v1(keys, indices_of(0, 1)) == [True, True]
    assert reader.batch_exists(keys) == 0
    writer.batch_set_v1(keys, indices_of(0, 1))

    assert reader.batch_exists(keys) == 2


@pytest.mark.parametrize("extra", [{"socket": ""}, {"model_path": ""}, {"interface_v1": 0}])
def test_a_missing_field_stops_the_start_and_is_named(make, extra):
    with pytest.raises(ConfigError, match=next(iter(extra))):
        make(**extra)


def test_an_engine_of_other_weights_finds_nothing(make, tmp_path):
    one, pool = make()
    pool.fill(0, 1)
    one.batch_set_v1(keys_of("doc", 1), indices_of(0))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"others")

    other, _ = make(model_path=str(tmp_path / "other"))

    assert other.batch_exists(keys_of("doc", 1)) == 0
    assert one.batch_exists(keys_of("doc", 1)) == 1


def test_an_engine_with_adapters_is_refused(make, monkeypatch):
    """Pages of an adapter have its name and path in their names, whatever is in its files."""
    monkeypatch.setattr(SETTINGS, adapters(enabled=True))

    with pytest.raises(ConfigError, match="--enable-lora"):
        make()
