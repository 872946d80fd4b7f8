"""The Triton kernels: interpreted, and compiled for real GPUs, in processes of their own.

Triton lies in a folder that no other process has on its path: vLLM for CPUs chooses other code
where it can import it. `.ci/setup` fills the folder, and says there why if it could not.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ASIDE = Path(sys.prefix) / "triton"
WHY_NOT = ASIDE / "why-not"


def reason_to_skip():
    if importlib.util.find_spec("triton") is not None or (ASIDE / "triton").is_dir():
        return ""
    why = WHY_NOT.read_text().strip() if WHY_NOT.is_file() else "`make setup` puts it there"
    return f"there is no Triton in {ASIDE}: {why}"


pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())


def run_cases(name, **environ):
    # read by triton when it is imported; no other test may have any of this
    environment = {**os.environ, "PYTHONPATH": str(ASIDE), **environ}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / name],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.timeout(920)
def test_every_case_passes_in_tritons_interpreter():
    done = run_cases("triton_cases.py", TRITON_INTERPRET="1")

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(920)
def test_kernels_compile_for_gpus_with_16_byte_accesses(tmp_path):
    done = run_cases("triton_compiled.py", TRITON_CACHE_DIR=str(tmp_path))

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_no_other_process_sees_triton():
    assert str(ASIDE) not in sys.path
