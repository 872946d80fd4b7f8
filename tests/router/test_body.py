"""A body's fields: the usual ones are read in one pass, and as each of them would be on its own."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixfleet.router.body import TRANSFER_KEY, read_body, with_fields

KINDS = {
    "model": str,
    "messages": list,
    "stream": bool,
    "n": int,
    "cache_salt": str,
    "tools": list,
    "documents": list,
    "chat_template_kwargs": dict,
    "reasoning_effort": str,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "add_special_tokens": bool,
    "prompt": str,
}
OPAQUE = ("chat_template", "truncate_prompt_tokens", "prompt_embeds", "mm_processor_kwargs")
NAMES = [*KINDS, *OPAQUE, TRANSFER_KEY, "other"]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
bodies = st.dictionaries(st.sampled_from(NAMES), values)


def alone(fields, name, kind):
    """What a field reads as if nothing else is looked at."""
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(json.dumps(fields[name]), type=kind)
    except msgspec.MsgspecError:
        return None


@given(bodies)
def test_every_field_reads_as_it_does_alone(fields):
    body = read_body(json.dumps(fields).encode())

    assert {name: body.get(name, kind) for name, kind in KINDS.items()} == {
        name: alone(fields, name, kind) for name, kind in KINDS.items()
    }
    for name in NAMES:
        assert body.is_set(name) == (fields.get(name) is not None)
        assert body.has(name) == (name in fields)


@given(bodies, st.sampled_from(["", " ", "\n\t"]))
def test_what_is_set_is_set_and_all_else_stays(fields, blank):
    raw = json.dumps(fields).replace("{", "{" + blank, 1) + blank
    ours = {TRANSFER_KEY: {"a": 1}, "cache_salt": "s"}

    changed = json.loads(with_fields(read_body(raw.encode()), ours))

    assert changed == {**fields, **ours}


@pytest.mark.parametrize("raw", [b'{"n":2,"n":3}', b'{"n":"x","n":3}', b'{"n":3,"m":[{}, {}]}'])
def test_the_last_of_equal_names_counts(raw):
    assert read_body(raw).get("n", int) == 3
