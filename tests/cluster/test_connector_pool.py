"""A node's pool as a copier maps it: what is let go when the copier ends."""

import threading

import pytest
from engine_rig import caches_of  # imports vLLM
from node_rig import NAMESPACE, fresh_chain

from prefixfleet.cluster.connector_copier import Copier
from prefixfleet.cluster.connector_paged import PagedKv
from prefixfleet.cluster.connector_pool import RankPool
from prefixfleet.cluster.connector_records import Save
from prefixfleet.cluster.connector_session import hello
from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.kernels.paged import PagedLayout
from prefixfleet.store import populate
from prefixfleet.store.populate import SLICE_BYTES
from prefixfleet.store.slot import SlotLayout

WAIT_S = 20.0


@pytest.fixture
def slices_wait(monkeypatch):
    """Pages get no places before this is set."""
    advise, go_on = populate._populate, threading.Event()
    monkeypatch.setattr(populate, "_populate", lambda *given: go_on.wait(60) and advise(*given))
    yield go_on
    go_on.set()


def test_a_copier_that_ends_wants_no_more_pages_of_the_pool(slices_wait, daemons):
    caches = caches_of(blocks=4)
    paged = PagedKv(caches, PagedLayout.from_tensors(caches))
    layout = SlotLayout(payload_bytes=paged.payload_bytes)
    client = EngineClient(daemons.start(), hello("e", "worker", 0, NAMESPACE, layout))
    pool = RankPool(client, layout, 0)
    copier = Copier(paged, pool)
    client.start()
    copier.start()
    copier.save([Save(0, "r", b"", ((fresh_chain(1)[0], 2),))], None)
    copier.wait(WAIT_S)
    assert [done.dropped for done in copier.take_results()[1]] == [0]

    assert copier.close()
    slices_wait.set()

    populating = pool._mapped.populating
    populating._thread.join(WAIT_S)
    assert not populating.running
    assert populating.done_bytes <= SLICE_BYTES < len(pool._mapped.memory)
    client.close()
