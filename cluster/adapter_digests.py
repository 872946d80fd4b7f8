"""Which content a LoRA adapter has that an engine uses: part of the names of its blocks.

Must not know requests or the daemon.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefixfleet.cluster.weights import State, weights_digest, weights_state
from prefixfleet.store.errors import ConfigError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


@dataclass(slots=True)
class _Files:
    """What an adapter was at its first request; no ``digest`` once it was something else."""

    path: str
    state: State
    digest: str


class AdapterDigests:
    """Digests of LoRA adapters' contents. Owned by the scheduler half.

    An engine keeps an adapter by its number, whatever its path says later; so does this. It may
    drop one that was not used for long and read its files again, so once they are others than at
    its first request nobody can tell which of them the engine has.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._known: dict[int, _Files] = {}

    def __call__(self, lora: "LoRARequest") -> str:
        """Raises `ConfigError` if it cannot be told which weights the engine uses."""
        if lora.load_inplace:  # also for requests that came before and still run
            self._known[lora.lora_int_id] = _Files(lora.lora_path, [], "")
        unclear = lora.load_inplace or lora.is_3d_lora_weight
        if unclear or not Path(lora.lora_path).is_dir():
            raise ConfigError(
                f"adapter {lora.lora_name}: it is loaded in place, its weights are read as 3D, or "
                f"{lora.lora_path!r} is no folder here"
            )
        state = weights_state(Path(lora.lora_path))
        known = self._known.get(lora.lora_int_id)
        if known is None:
            digest = weights_digest(Path(lora.lora_path), self._cache_dir)
            known = self._known[lora.lora_int_id] = _Files(lora.lora_path, state, digest)
        if known.path != lora.lora_path:
            raise ConfigError(
                f"adapter {lora.lora_name}: number {lora.lora_int_id} was {known.path!r} before, "
                f"now {lora.lora_path!r}"
            )
        if known.state != state:
            digest = weights_digest(Path(lora.lora_path), self._cache_dir)
            known.state, known.digest = state, digest if digest == known.digest else ""
        if not known.digest:
            raise ConfigError(
                f"adapter {lora.lora_name}: the files in {lora.lora_path!r} have changed since its "
                "first request; load changed files from a new folder"
            )
        return known.digest
