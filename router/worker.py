"""A worker that passed the parity check, with everything that routing asks of it."""

from dataclasses import dataclass, field

from prefixfleet.router.tokens import Tokens
from prefixfleet.store.records import WorkerRecord


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """``namespace`` is the digest that its chains start from.

    ``static`` is a plain engine from the workers file: it takes no plan and reports no outcome.
    """

    record: WorkerRecord
    tokens: Tokens
    namespace: bytes
    block_tokens: int
    static: bool = False
    name: str = field(init=False)  # unique in the fleet

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.record.worker)
