"""Settings in the chart and in the reference are settings that the processes know."""

import re

import pytest
import settings_reference
from helm_chart import EXAMPLES, containers, objects, pod_templates

from prefixfleet.router.settings import RouterSettings
from prefixfleet.store.settings import FleetSettings

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def _environments(example):
    for name, pod in pod_templates(objects(example)):
        for container in containers(pod):
            yield name, {e["name"]: e.get("value", "") for e in container.get("env", [])}


@each_example
def test_every_variable_of_ours_is_a_setting_that_the_process_knows(example):
    """An unknown one stops the start: better here than in a cluster."""
    known = settings_reference.names()

    for name, environ in _environments(example):
        assert {n for n in environ if n.startswith("PREFIXFLEET_")} <= known, name


@each_example
def test_a_router_starts_with_what_the_chart_gives_it(example):
    [environ] = [e for name, e in _environments(example) if name.endswith("-router")]
    environ["PREFIXFLEET_REDIS_URL"] = environ["PREFIXFLEET_REDIS_URL"] or "redis://elsewhere"

    settings, fleet = RouterSettings.read(environ), FleetSettings.read(environ)

    assert settings.host == "0.0.0.0"
    assert str(fleet.secret_file) == "/etc/prefixfleet/cluster-secret"


@each_example
def test_secrets_come_by_reference_only(example):
    """No literal in a manifest: what is in a release can be read by whoever may list releases."""
    for name, pod in pod_templates(objects(example)):
        for container in containers(pod):
            for variable in container.get("env", []):
                if re.search(r"PASSWORD|TOKEN$|SECRET|_AUTH$|REDIS_URL|KEY", variable["name"]):
                    literal = variable.get("value", "$(")
                    harmless = "$(" in literal or literal.startswith("/") or literal == "token"
                    assert harmless, f"{name}: {variable['name']}"
    assert not [o for o in objects(example) if o["kind"] == "Secret"]


def test_reference_and_schema_are_what_the_code_says():
    """Write them anew with `python tests/support/settings_reference.py`."""
    assert settings_reference.PAGE.read_text() == settings_reference.page()
    assert settings_reference.SCHEMA.read_text() == settings_reference.schema()
