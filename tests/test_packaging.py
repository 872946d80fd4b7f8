"""The wheel is what users get: it must hold every module and run without the fleet's packages."""

import importlib.util
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cluster", "kernels", "router", "store", "transfer")
DATA_SUFFIXES = {".py", ".typed", ".lua", ".yaml", ".html", ".js", ".css"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel built the way a release is: from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", out, ROOT], check=True, capture_output=True
    )
    return next(out.glob("*.whl"))


def test_kernels_has_no_init_file():
    """With one, the root on sys.path would shadow the package `kernels` that transformers uses."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.timeout(300)
def test_a_wheel_built_from_the_sdist_holds_every_module(wheel):
    expected = {
        f"prefixfleet/{folder}/{path.name}"
        for folder in FOLDERS
        for path in (ROOT / folder).iterdir()
        if path.suffix in DATA_SUFFIXES
    }

    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("prefixfleet/")}

    assert shipped == expected


def test_code_folders_are_flat():
    """A sub-folder with code works from a checkout and is missing from the wheel."""
    nested = [p for f in FOLDERS for p in (ROOT / f).glob("*/**/*.py")]

    assert nested == []


@pytest.mark.timeout(600)
def test_the_wheel_runs_in_a_clean_environment_without_ray_torch_and_ucx(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    bin_dir = tmp_path / "env" / "bin"
    subprocess.run([bin_dir / "pip", "install", "-q", wheel], check=True, capture_output=True)

    for command in ("prefixfleet", "prefixfleet-router"):
        shown = subprocess.run(
            [bin_dir / command, "--help"], check=True, capture_output=True, text=True, cwd=tmp_path
        )
        assert "usage: prefixfleet" in shown.stdout
    installed = subprocess.run(
        [bin_dir / "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    ).stdout.lower()
    assert "prefixfleet==" in installed
    assert not any(line.startswith(("ray=", "torch=", "ucxx")) for line in installed.splitlines())


def test_every_module_is_importable_by_its_public_name():
    """`prefixfleet.X` is the only import root."""
    for folder in FOLDERS:
        assert importlib.util.find_spec(f"prefixfleet.{folder}") is not None
