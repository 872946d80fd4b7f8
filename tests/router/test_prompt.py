"""What is read of a request's prompt is bounded, whatever a client sends."""

import json

import pytest
from chats import tokenizer

from prefixfleet.router import prompt as module
from prefixfleet.router.body import read_body
from prefixfleet.router.errors import BadRequest
from prefixfleet.router.prompt import MAX_KEPT_SALT, MAX_OUTPUTS, prefix_chain, read_completion
from prefixfleet.router.tokens import Tokens

TOKENS = Tokens(tokenizer(), {}, {})


def read(**fields):
    return read_completion(
        read_body(json.dumps({"prompt": [1, 2, 3, 4], **fields}).encode()), TOKENS
    )


@pytest.mark.parametrize("prompt", [[1], 7])
def test_more_outputs_than_any_engine_allows_are_refused(prompt):
    for n in (MAX_OUTPUTS + 1, 1 << 63, 1 << 64, 10**400):
        with pytest.raises(BadRequest, match=f"expected 1 to {MAX_OUTPUTS}") as refused:
            read(prompt=prompt, n=n)
        assert refused.value.param == "n"
        assert len(str(refused.value)) < 100


@pytest.mark.parametrize(
    ("n", "prompt", "outputs"),
    [
        (None, [1], 1),
        (0, [1], 1),
        (-5, [1], 1),
        (-(10**400), [1], 1),
        ("2", [1], 1),
        (MAX_OUTPUTS, [1], MAX_OUTPUTS),
        (3, [[1], [2]], 6),
        (MAX_OUTPUTS, [[1], [2]], MAX_OUTPUTS),
    ],
)
def test_outputs_are_counted(n, prompt, outputs):
    assert read(n=n, prompt=prompt).outputs == outputs


def test_a_long_salt_is_not_kept():
    module._root.cache_clear()
    chains = [
        prefix_chain(read(cache_salt=salt * length), b"n", 2, b"k" * 32)
        for salt in "ab"
        for length in (MAX_KEPT_SALT, MAX_KEPT_SALT + 1, MAX_KEPT_SALT + 1)
    ]

    assert module._root.cache_info().currsize == 2
    assert chains[1] == chains[2]
    assert len({chain[0] for chain in chains}) == 4
