"""Ray of our own: what is said when it does not start; the rest is tests/system/test_fleet.py."""

import pytest

from prefixfleet.cluster.fleet import RayFleet
from prefixfleet.store.errors import ConfigError


async def test_a_ray_that_does_not_start_is_an_error_in_words(tmp_path):
    too_long_for_sockets = tmp_path / ("folder" * 30)

    with pytest.raises(ConfigError, match=r"Ray did not start: .*path"):
        async with RayFleet("f", too_long_for_sockets, tmp_path):
            pass
