"""Fixtures that more than one folder of tests uses."""

import os
import signal

import hypothesis  # its plugin would import it deep in a hook, where CPython 3.11 fails
import pytest
from clocks import ManualClock
from redis_servers import new_fleet, running_server

# The same examples in every run: a test that passed does not fail by luck later. `make fuzz` draws.
# However long a busy machine takes for them is no fault.
hypothesis.settings.register_profile(
    "here",
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("here")

# A shell's job in the background ignores Ctrl-C, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def clock():
    """Seconds that pass only when the test says so."""
    return ManualClock()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    """A real server, shared by the whole session: use a `fleet` of your own on it."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server):
    """Where the shared server is, with its password."""
    return redis_server.url


@pytest.fixture
def fleet():
    """Name of a fleet that no other test uses."""
    return new_fleet()
