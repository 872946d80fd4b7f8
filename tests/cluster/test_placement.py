"""Which processes belong on which host of a Ray cluster."""

import pytest

from prefixfleet.cluster.placement import chosen, engine_hosts, host_name, places, updated
from prefixfleet.cluster.settings import NodeSettings
from prefixfleet.store.records import FleetWish


def _host(name="gpu-1", *, alive=True, life="a1b2c3d4e5f6", **resources):
    return {
        "NodeID": life,
        "Alive": alive,
        "NodeManagerAddress": "192.0.2.1",
        "NodeManagerHostname": name,
        "Resources": {"CPU": 8.0, **resources},
    }


def test_a_host_that_asks_for_nothing_gets_nothing():
    """The head, usually."""
    assert places([_host()]) == {}


def test_a_host_gets_one_daemon_and_the_engines_it_asks_for():
    found = places([_host(prefixfleet_engines=2.0)])

    assert list(found) == [
        "node-gpu-1-a1b2c3d4",
        "worker-gpu-1-0-a1b2c3d4",
        "worker-gpu-1-1-a1b2c3d4",
    ]
    assert [p.kind for p in found.values()] == ["node", "worker", "worker"]
    assert {p.ray_node for p in found.values()} == {"a1b2c3d4e5f6"}


def test_engines_know_their_node_and_the_address_peers_reach_it_by():
    [_, worker] = places([_host(prefixfleet_engines=1.0)]).values()

    assert worker.given == {
        "PREFIXFLEET_NODE_NAME": "gpu-1",
        "PREFIXFLEET_NODE_HOST": "192.0.2.1",
        "PREFIXFLEET_WORKER_NAME": "gpu-1-0",
        "PREFIXFLEET_WORKER_NODE": "gpu-1",
        "PREFIXFLEET_WORKER_HOST": "192.0.2.1",
    }


@pytest.mark.parametrize(("engines", "gpus"), [(8.0, 1.0), (2.0, 4.0), (1.0, 8.0)])
def test_the_gpus_of_a_host_are_shared_out_among_its_engines(engines, gpus):
    found = places([_host(prefixfleet_engines=engines, GPU=8.0)])

    assert {p.gpus for p in found.values() if p.kind == "worker"} == {gpus}
    assert found["node-gpu-1-a1b2c3d4"].gpus == 0


def test_a_host_that_died_keeps_nothing_and_its_next_life_shares_no_name_with_it():
    """An actor of the old life may still be known to Ray when the new one is placed."""
    dead = _host(alive=False, prefixfleet_engines=1.0)
    again = _host(life="ffffffff0000", prefixfleet_engines=1.0)

    assert places([dead]) == {}
    assert not set(places([dead, again])) & set(places([_host(prefixfleet_engines=1.0)]))


def test_a_router_runs_where_it_is_asked_for():
    [router] = places([_host(prefixfleet_router=1.0)]).values()

    assert (router.kind, router.gpus) == ("router", 0)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-1", "gpu-1"),
        ("GPU_1.example.com", "gpu-1-example-com"),
        ("fleet-worker-with-a-very-long-name-0123456789-x7k2p", "ry-long-name-0123456789-x7k2p"),
        ("...", "host"),
    ],
)
def test_a_hosts_name_becomes_a_nodes_name(host, name, tmp_path_factory):
    made = host_name(host)
    folder = tmp_path_factory.mktemp("n")  # short: Unix sockets are made in it

    settings = NodeSettings(name=made, runtime_dir=folder)

    assert made.endswith(name)
    assert settings.name == made
    NodeSettings(name=f"{made}-99", runtime_dir=folder)


def _hosts(*names):
    return places([_host(name, prefixfleet_engines=1.0) for name in names])


def _nodes(found):
    return sorted({place.node for place in found.values()})


def test_a_number_of_nodes_bounds_the_hosts_but_takes_none_away():
    wanted = _hosts("a", "b", "c")
    at_c = "node-c-a1b2c3d4"

    assert _nodes(chosen(wanted, [], 0)) == ["a", "b", "c"]
    assert _nodes(chosen(wanted, [], 2)) == ["a", "b"]
    assert _nodes(chosen(wanted, [at_c], 2)) == ["a", "c"]
    assert _nodes(chosen(wanted, [at_c], 1)) == ["c"]
    assert _nodes(chosen(wanted, list(wanted), 1)) == ["a", "b", "c"]
    assert _nodes(chosen(wanted, [], 9)) == ["a", "b", "c"]


def test_routers_are_not_counted_as_nodes():
    wanted = places([_host("r", prefixfleet_router=1.0), _host("a", prefixfleet_engines=1.0)])

    assert sorted(chosen(wanted, [], 1)) == sorted(wanted)
    assert list(engine_hosts(wanted)) == ["a"]


def test_an_update_changes_the_engines_settings_and_not_where_they_are():
    [daemon, worker] = _hosts("a").values()
    wish = FleetWish(
        rollout=3,
        environ={"PREFIXFLEET_WORKER_DRAIN_S": "1", "PREFIXFLEET_WORKER_NAME": "other"},
    )

    assert updated(daemon, wish) == daemon
    assert updated(worker, wish).given == {
        **worker.given,
        "PREFIXFLEET_WORKER_DRAIN_S": "1",
        "PREFIXFLEET_WORKER_ROLLOUT": "3",
    }
    assert (updated(worker, wish).actor, updated(worker, wish).worker) == (worker.actor, "a-0")
