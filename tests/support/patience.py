"""Limits of engines on their daemon, for a machine that stands still for seconds now and then."""

from typing import Any

from prefixfleet.cluster import (
    cache_api,
    connector_lookup,
    connector_pool,
    connector_session,
    evictions,
)

ANSWER_S = 30.0
"""Production's is a second or two: later than that a block is better computed."""


def be_patient(monkeypatch: Any) -> None:
    """No engine of this process gives a daemon up that answers late, nor a pool one that makes
    room late: tests of what is found and stored are not about that."""
    monkeypatch.setattr(connector_lookup, "GRACE_S", ANSWER_S)
    monkeypatch.setattr(connector_pool, "ASK_S", ANSWER_S)
    monkeypatch.setattr(connector_session, "SETTLE_S", ANSWER_S)
    monkeypatch.setattr(cache_api, "GRACE_S", ANSWER_S)
    monkeypatch.setattr(evictions, "WAIT_S", ANSWER_S / 2)  # shorter than an engine waits
