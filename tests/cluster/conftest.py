"""Fixtures of the connector's tests: engines without a model, on real daemons."""

import pytest
from patience import be_patient


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    be_patient(monkeypatch)


@pytest.fixture
def daemons(tmp_path_factory):
    """Real node daemons in a thread of their own."""
    from daemons import Daemons

    with Daemons(tmp_path_factory.mktemp("pf")) as running:
        yield running


@pytest.fixture
def node_socket(daemons):
    """Socket of the daemon "a"."""
    return daemons.start()


@pytest.fixture
def start(tmp_path, monkeypatch, node_socket):
    """Starts engines; each has its own paged KV and shares the pool of its node ("a")."""
    from engine_rig import EngineRig, engine_config, model_folder  # imports vLLM: seconds

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usual = model_folder(tmp_path / "model")
    rigs = []

    def start_engine(blocks=64, at=None, model=usual, **options):
        config = engine_config(model, at or node_socket, blocks=blocks, **options)
        rigs.append(EngineRig(config, blocks=blocks))
        return rigs[-1]

    yield start_engine
    for rig in rigs:
        rig.close()
