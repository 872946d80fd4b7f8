"""As what an engine is known to its node's daemon, and the scheduler half's connection to it."""

import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from prefixfleet.cluster.engine_client import EngineClient
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.namespace import Namespace, in_era
from prefixfleet.store.slot import SlotLayout

SETTLE_S = 5.0
"""How long the engine's start waits for the daemon's first answer."""


class Session:
    """One connection at a time; a reset begins another era with another one.

    Owned by the scheduler half, in its thread. ``events`` says where the engine tells of its own
    cache: fields of the hello.
    """

    def __init__(self, socket: Path, engine: str, events: Mapping[str, str]) -> None:
        self._socket = socket
        self._engine = engine
        self._events = events
        self.era = ""  # changes when the engine's caches were reset; part of the namespace
        self.client = EngineClient(socket, {})  # until `open`: no daemon
        self._losses = 0  # of the daemon, counted so far

    def open(self, namespace: Namespace, layout: SlotLayout) -> None:
        """Connect as the engine of ``namespace``; a daemon that is away is waited for in the
        background.

        Raises `ConfigError` if the daemon refuses this engine.
        """
        self.namespace, self.layout = namespace, layout
        self._connect()
        if self.client.settle(SETTLE_S) is None and self.client.refusal:
            refusal = self.client.refusal
            self.close()
            raise ConfigError(f"prefixfleet: the node daemon refuses this engine: {refusal}")

    def close(self) -> None:
        """End the connection; the daemon frees what it held for this engine."""
        self.client.close()

    def reset(self) -> None:
        """Go on in a namespace that nobody shares."""
        self.era = uuid.uuid4().hex
        self.close()
        self._losses = 0
        self._connect()

    def take_losses(self) -> int:
        """How often the daemon was lost since the last call."""
        new, self._losses = self.client.losses - self._losses, self.client.losses
        return new

    def _connect(self) -> None:
        namespace = in_era(self.namespace, self.era)
        known = hello(self._engine, "scheduler", 0, namespace, self.layout)
        self.client = EngineClient(self._socket, {**known, **self._events})
        self.client.start()


def hello(
    engine: str, role: str, rank: int, namespace: Namespace, layout: SlotLayout
) -> dict[str, object]:
    """Fields of the first question on a connection."""
    return {
        "engine": engine,
        "role": role,
        "rank": rank,
        "namespace": asdict(namespace),
        "payload_bytes": layout.payload_bytes,
        "shards": layout.shards,
    }
