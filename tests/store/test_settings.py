"""The one reader of the environment: a wrong or unknown setting stops the start and says why."""

from typing import ClassVar

import pytest

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.settings import FleetSettings, Section


class Router(Section):
    section: ClassVar[str] = "ROUTER_"
    port: int = 8000
    wait_s: float = 1.0


def test_defaults_hold_when_nothing_is_set():
    assert FleetSettings.read({"PATH": "/bin"}).fleet == "default"


def test_values_are_read_and_typed():
    assert Router.read({"PREFIXFLEET_ROUTER_PORT": "9"}).port == 9


def test_an_unknown_name_stops_the_start_and_names_the_nearest():
    with pytest.raises(ConfigError, match=r"PREFIXFLEET_REDIS_URI; did you mean .*REDIS_URL"):
        FleetSettings.read({"PREFIXFLEET_REDIS_URI": "redis://x"})


def test_names_of_another_section_are_left_to_their_process():
    FleetSettings.read({"PREFIXFLEET_ROUTER_PORT": "9"})
    Router.read({"PREFIXFLEET_FLEET": "a"})


def test_every_problem_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Router.read({"PREFIXFLEET_ROUTER_PORT": "nine", "PREFIXFLEET_ROUTER_PROT": "9"})

    assert "PREFIXFLEET_ROUTER_PORT" in str(caught.value)
    assert "PREFIXFLEET_ROUTER_PROT" in str(caught.value)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
def test_no_setting_has_no_end(value):
    with pytest.raises(ConfigError, match="PREFIXFLEET_ROUTER_WAIT_S: Input should be a finite"):
        Router.read({"PREFIXFLEET_ROUTER_WAIT_S": value})


def test_secrets_are_not_shown():
    settings = FleetSettings.read({"PREFIXFLEET_REDIS_URL": "redis://:hunter2@h/0"})

    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_a_missing_or_short_secret_says_what_to_set(tmp_path, content):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match="PREFIXFLEET_SECRET_FILE"):
        FleetSettings.read({"PREFIXFLEET_SECRET_FILE": str(path)}).secret()


def test_the_secret_is_read_without_its_newline(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")

    settings = FleetSettings.read({"PREFIXFLEET_SECRET_FILE": str(path)})

    assert settings.secret() == b"0123456789abcdef"
