"""Digest of a model's or adapter's files, so that KV of other weights is never taken for theirs.

Must not know engines. Reading a large model takes minutes, so a digest is kept beside the sizes
and times of the files it was made from, and made again when one of those changed.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefixfleet.store.errors import ConfigError

log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
CONFIG_NAMES = frozenset({"config.json", "adapter_config.json"})
DIGEST_BYTES = 16
MAX_READERS = 8


State = list[tuple[str, int, int, int]]
"""Of files: names, sizes, times. Equal as long as none of them was written or replaced."""


def weights_state(source: Path) -> State:
    """State of the files that `weights_digest` reads. Raises `ConfigError` if that is unknown."""
    return _files_now(source)[1]


def weights_digest(source: Path, cache_dir: Path) -> str:
    """Hex BLAKE2b over the names and contents of the weights and config files of ``source``.

    ``source`` is a folder or one file; its own path does not count. The tokenizer does not
    count either: KV is made from token ids.

    Raises:
        ConfigError: there is no weights file, or one cannot be read.
    """
    files, state = _files_now(source)
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise ConfigError(
            f"weights: no {'/'.join(sorted(WEIGHT_SUFFIXES))} file in {source}; "
            "name the folder that the engine loads"
        )
    kept = cache_dir / "weights" / f"{hashlib.sha256(bytes(source.resolve())).hexdigest()}.json"
    return _recall(kept, state) or _remember(kept, state, _digest(files))


def _files_now(source: Path) -> tuple[list[Path], State]:
    try:
        files = sorted(_weight_files(source))
        return files, [(path.name, *_stamp(path)) for path in files]
    except OSError as error:
        raise ConfigError(f"weights: {error}") from error


def _weight_files(source: Path) -> Iterator[Path]:
    for path in source.iterdir() if source.is_dir() else [source]:
        if path.suffix in WEIGHT_SUFFIXES or path.name in CONFIG_NAMES:
            yield path


def _stamp(path: Path) -> tuple[int, int, int]:
    # ctime too: copying tools set mtime back, nothing sets ctime
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _digest(files: list[Path]) -> str:
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"pf-weights")
    try:
        with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as readers:
            for path, part in zip(files, readers.map(_file_digest, files), strict=True):
                whole.update(f"{path.name}\0".encode() + part)
    except OSError as error:
        raise ConfigError(f"weights: {error}") from error
    return whole.hexdigest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).digest()


def _recall(kept: Path, state: State) -> str | None:
    try:
        known = json.loads(kept.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict) or known.get("files") != [list(entry) for entry in state]:
        return None
    digest = known.get("digest")
    return digest if isinstance(digest, str) else None


def _remember(kept: Path, state: State, digest: str) -> str:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            json.dump({"files": state, "digest": digest}, file)
        Path(file.name).replace(kept)
    except OSError as error:
        log.warning("weights: digest not kept, it is made again at the next start (%s)", error)
    return digest
