"""Identity of KV bytes, in one place: two chains that differ in any field never meet.

Must not know engines, Redis or tensors; it only turns records into digests.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

import msgpack

from prefixfleet.store.errors import ConfigError

DIGEST_BYTES = 16
RECORD_VERSION = 1
_ERA = "#"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything about an engine that changes the bytes of its KV blocks.

    Equal namespaces promise interchangeable bytes; a difference in any field gives another
    root and therefore a miss everywhere. The engine's connector fills it in from the loaded
    model and the tensors it was handed, never from what an operator typed.

    Raises:
        ConfigError: a text is empty or a number is below 1.
    """

    model: str  # architecture and shape, not the served name
    weights: str  # digest of the weights and config files, or a pinned revision
    dtype: str  # of the KV cache, e.g. "float32"
    block_tokens: int
    layout: str  # physical order of a block's bytes, e.g. "LBHNC/cpu-vec/f32[30,3,32,128]"
    engine: str  # engine family, e.g. "vllm"
    isa: str  # attention kernel's instruction set where it packs K its own way, else "any"
    tensor_parallel: int
    encoding: str = "exact"
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == "" or (isinstance(value, int) and value < 1):
                raise ConfigError(
                    f"namespace field {field.name!r}: got {value!r}, expected a non-empty text "
                    "or a number of at least 1"
                )

    def digest(self, key: bytes) -> bytes:
        """Keyed digest of the record, ``DIGEST_BYTES`` long. ``key`` is the cluster secret."""
        return _digest(b"namespace", dataclasses.astuple(self), hash_key(key))


def in_era(namespace: Namespace, era: str) -> Namespace:
    """The namespace after a reset: what was kept before it matches nothing, here and elsewhere.

    An engine's caches are reset when its weights were changed in place, which no file shows.
    """
    weights = f"{namespace.weights}{_ERA}{era}"
    return dataclasses.replace(namespace, weights=weights) if era else namespace


def is_of_era(namespace: Namespace) -> bool:
    """Whether it is that of one engine, between two of its resets."""
    return _ERA in namespace.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of one request, besides its tokens, changes its KV bytes or who may share them.

    ``lora`` is the digest of the adapter's content, not its name or path (of plain engines, whose
    bytes are never exchanged, its name); ``salt`` isolates a tenant. Both empty: the blocks are
    shared by everybody in the namespace.
    """

    lora: str = ""
    salt: str = ""


def chain_root(namespace: bytes, scope: Scope, key: bytes) -> bytes:
    """Root of every prefix chain of a request: digest of (namespace digest, scope).

    ``key`` comes from `hash_key`, as in `extend_chain`: an engine knows that, never the secret.
    Fields are encoded with their names, so that a LoRA called like a salt stays different.
    """
    return _digest(b"root", (namespace, "lora", scope.lora, "salt", scope.salt), key)


def _digest(kind: bytes, values: tuple[object, ...], key: bytes) -> bytes:
    packed: bytes = msgpack.packb(values, use_bin_type=True)
    # `person` separates the uses of one key, so that a digest of one kind is never one of another
    return hashlib.blake2b(
        packed, digest_size=DIGEST_BYTES, key=key, person=kind.ljust(16, b"\0")
    ).digest()


def hash_key(secret: bytes) -> bytes:
    """Key for block hashes, derived from the cluster secret so that it never leaves as itself."""
    return hashlib.blake2b(secret, digest_size=32, person=b"pf-hash-key").digest()
