"""Records that cross a process boundary arrive whole or are refused with a reason."""

import dataclasses

import msgpack
import pytest

from prefixfleet.store.errors import ConfigError
from prefixfleet.store.records import NodeRecord, Outcome, PullPlan, WorkerRecord

RECORDS = [
    NodeRecord(node="a", host="127.0.0.1", contacts={"tcp": "tcp://127.0.0.1:1"}, stats={"x": 1}),
    WorkerRecord(
        worker="w",
        node="a",
        url="http://127.0.0.1:1",
        model="m",
        model_path="/models/m",
        namespace={"model": "m"},
        block_bytes=1,
        max_model_tokens=1,
        prefill_tokens_per_s=1.5,
    ),
    PullPlan(request="r", source="b", source_epoch=3, blocks=7, budget_s=0.5),
    Outcome(
        request="r",
        prompt_blocks=3,
        engine_blocks=0,
        local_blocks=1,
        pulled_blocks=1,
        pulled_bytes=10,
        pull_s=0.1,
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_decode_is_the_inverse_of_encode(record):
    assert type(record).decode(record.encode()) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize(
    "junk",
    [b"", b"\xc1", b"{}", msgpack.packb([1]), msgpack.packb({"version": 1}), msgpack.packb(None)],
)
def test_junk_is_refused_with_the_type_of_the_record(record, junk):
    with pytest.raises(ConfigError, match=type(record).__name__):
        type(record).decode(junk)


def test_another_version_is_refused():
    values = msgpack.unpackb(RECORDS[0].encode()) | {"version": 2}

    with pytest.raises(ConfigError, match="expected version 1"):
        NodeRecord.decode(msgpack.packb(values))


def test_a_field_more_or_less_is_refused_by_name():
    values = msgpack.unpackb(RECORDS[2].encode())

    with pytest.raises(ConfigError, match="colour"):
        PullPlan.from_map(values | {"colour": "red"})
    del values["blocks"]
    with pytest.raises(ConfigError, match="blocks"):
        PullPlan.from_map(values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blocks", "many"),
        ("source", 5),
        ("budget_s", None),
        ("blocks", True),
        ("blocks", -1),
        ("budget_s", float("nan")),
        ("budget_s", float("inf")),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(field, value):
    """A plan arrives from the network: a text where a number belongs must not reach arithmetic."""
    values = msgpack.unpackb(RECORDS[2].encode()) | {field: value}

    with pytest.raises(ConfigError, match=field):
        PullPlan.from_map(values)


NAMESPACE = {
    "model": "m", "weights": "w", "dtype": "float32", "block_tokens": 32, "layout": "l",
    "engine": "vllm", "isa": "any", "tensor_parallel": 1, "encoding": "exact", "version": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [{"model": "m"}, NAMESPACE | {"block_tokens": "32"}, NAMESPACE | {"shape": 1}]
)
def test_a_worker_with_a_wrong_namespace_says_so(wrong):
    worker = dataclasses.replace(RECORDS[1], namespace=wrong)

    with pytest.raises(ConfigError, match="worker w: namespace"):
        worker.identity()


def test_a_worker_tells_its_namespace():
    worker = dataclasses.replace(RECORDS[1], namespace=NAMESPACE)

    assert worker.identity().block_tokens == 32
