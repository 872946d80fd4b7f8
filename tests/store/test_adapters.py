"""An engine's list of models: which of them are adapters."""

import json

import pytest

from prefixfleet.store.adapters import MAX_BYTES, MAX_NAME, adapters_in
from prefixfleet.store.errors import ProtocolError


def listing(*cards):
    return json.dumps({"object": "list", "data": cards}).encode()


def test_an_adapter_is_a_model_with_a_parent():
    cards = listing(
        {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 2048},
        {"id": "alias", "root": "/models/base"},
        {"id": "straße 法", "root": "/adapters/law", "parent": "base", "permission": []},
        {"id": "nowhere", "root": None, "parent": "base"},
    )

    assert adapters_in(cards) == {"straße 法": "/adapters/law", "nowhere": ""}


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME + 1)])
def test_names_that_nobody_could_ask_for_are_left_out(name):
    assert adapters_in(listing({"id": name, "parent": "base"})) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff", b'{"data": {}}', b'{"data": [{"id": 1}]}', b"[" * 10_000,
     b'{"data": [{"id": "a", "parent": 3}]}', b" " * (MAX_BYTES + 1)],
    ids=["empty", "list", "no data", "no text", "map", "number", "deep", "parent", "long"],
)  # fmt: skip
def test_anything_else_is_refused(content):
    with pytest.raises(ProtocolError, match="list of models: got"):
        adapters_in(content)
