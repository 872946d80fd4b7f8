"""A worker that passed the parity check, with everything that routing asks of it."""

from dataclasses import dataclass, field, replace

from prefixfleet.router.tokens import Tokens
from prefixfleet.store.namespace import DIGEST_BYTES
from prefixfleet.store.records import WorkerRecord


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """``namespace`` is the digest that its chains start from.

    ``static`` is a plain engine from the workers file: it takes no plan and reports no outcome.
    With one of its LoRA adapters it is a worker of its own, of the same name and load: ``adapter``
    is what clients call that, ``lora`` what its chains are told apart by (`Scope`); None where that
    is not known: then nothing of it is found, and load alone decides.
    """

    record: WorkerRecord
    tokens: Tokens
    namespace: bytes
    block_tokens: int
    static: bool = False
    adapter: str = ""
    lora: str | None = ""
    name: str = field(init=False)  # unique in the fleet
    kind: bytes = field(init=False)  # equal for workers that see equal chains; empty for none

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.record.worker)
        kind = b"" if self.lora is None else self.namespace + self.lora.encode()
        object.__setattr__(self, "kind", kind)

    def with_adapter(self, adapter: str, lora: str | None) -> "Worker":
        """The same engine as it serves that adapter."""
        return replace(self, adapter=adapter, lora=lora)


def namespace_of(kind: bytes) -> bytes:
    """Digest of the namespace of workers of that `Worker.kind`."""
    return kind[:DIGEST_BYTES]
