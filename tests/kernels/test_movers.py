"""Every fast path moves the bytes that the reference moves, whatever the layout."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_caches import KINDS, Sizes, fill, make_paged, slots_for

from prefixfleet.kernels import reference
from prefixfleet.kernels.encoding import ENCODINGS, encoded_bytes, is_storable
from prefixfleet.kernels.mover import mover_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = st.builds(
    Sizes,
    layers=st.integers(1, 4),
    blocks=st.integers(3, 6),
    heads=st.integers(1, 3),
    tokens=st.sampled_from([2, 3, 16, 32]),
    channels=st.sampled_from([2, 5, 16, 64]),
)


def holds(kind, encoding):
    return not (kind.startswith("mla") and encoding == "fp8-values")


CASES = [(kind, encoding) for kind in KINDS for encoding in ENCODINGS if holds(kind, encoding)]


@pytest.mark.parametrize(("kind", "encoding"), CASES)
@settings(max_examples=12)
@given(data=st.data())
def test_a_mover_equals_the_reference_bit_for_bit(kind, encoding, data):
    sizes, dtype = data.draw(SIZES), data.draw(st.sampled_from(DTYPES))
    caches, layout = make_paged(kind, sizes, dtype)
    fill(caches, seed=data.draw(st.integers(0, 1000)))
    ids = data.draw(st.lists(st.integers(0, sizes.blocks - 1), max_size=5))
    targets = data.draw(st.permutations(range(sizes.blocks)))[: len(set(ids))]
    mover = mover_for(caches, layout, encoding)
    expected = slots_for(encoded_bytes(layout, encoding), len(ids))
    got = slots_for(mover.payload_bytes, len(ids))
    outcomes = []

    reference.gather(caches, layout, ids, expected, encoding)
    mover.gather(ids, got)
    for scatter in (reference.scatter, None):
        fill(caches, seed=7)
        sources = got[: len(targets)]
        if scatter:
            scatter(caches, layout, targets, sources, encoding)
        else:
            mover.scatter(targets, sources)
        outcomes.append({name: cache.clone() for name, cache in caches.items()})

    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
        assert is_storable(other.numpy().tobytes(), encoding)
    for name in caches:
        assert torch.equal(outcomes[0][name], outcomes[1][name])


def test_exact_blocks_need_neither_numba_nor_triton():
    """vLLM 0.32's CPU worker cannot start in a process that has imported llvmlite."""
    script = (
        "import sys, torch\n"
        "from prefixfleet.kernels.mover import mover_for\n"
        "from prefixfleet.kernels.paged import PagedLayout\n"
        "caches = {'a': torch.zeros(2, 1, 2, 4)}\n"
        "mover_for(caches, PagedLayout.from_tensors(caches))\n"
        "print(sorted({'numba', 'llvmlite', 'triton'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )

    assert done.stdout.strip() == "[]", done.stderr
