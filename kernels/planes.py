"""How a page splits into planes: K, V, or MLA's latent, each a grid of groups, rows and a run.

8-bit kernels work on planes, so one kernel serves every engine layout: element (g, r, i) of a
plane lies at ``groups[g] + rows[r] + i`` of its page. A group shares its scales: a KV head of a
layer, or one channel of it where the layout keeps a channel's tokens together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from prefixfleet.kernels.paged import Content, Page

TOKEN_AXES = "NR"


@dataclass(frozen=True, slots=True)
class Plane:
    """Where K or V lies in a page; offsets and lengths in elements. Groups, then rows, in order."""

    keys: bool  # attention scores come from it: K, and MLA's latent
    latent: bool
    groups: tuple[int, ...]
    rows: tuple[int, ...]
    width: int  # elements of a run
    column_scales: bool  # one scale a (group, position in the run), else one a group

    @property
    def num_scales(self) -> int:
        """Scales of one block's plane."""
        return len(self.groups) * (self.width if self.column_scales else 1)

    @property
    def num_elements(self) -> int:
        """Elements of one block's plane."""
        return len(self.groups) * len(self.rows) * self.width


class _Axis(NamedTuple):
    letter: str
    size: int
    stride: int


def split(page: Page, content: Content, *, channel_keys: bool) -> tuple[Plane, ...]:
    """The planes of ``page``, K before V; with ``channel_keys``, K has one scale a channel.

    Raises:
        ValueError: the content is opaque, or tokens or channels are not innermost.
    """
    axes = [_Axis(page.axes[i], page.sizes[i], page.strides[i]) for i in page.order]
    if content is Content.LATENT:
        parts = [(0, [axis._replace(letter="D") if axis.letter == "C" else axis for axis in axes])]
    elif content is Content.KEYS_TRANSPOSED:
        parts = _transposed(axes)
    elif content is Content.PLAIN:
        parts = _halves(axes)
    else:
        raise ValueError("8-bit encodings need to know K from V, got opaque pages")
    latent = content is Content.LATENT
    return tuple(
        _plane(offset, part, keys=(i == 0), latent=latent, by_channel=channel_keys and i == 0)
        for i, (offset, part) in enumerate(parts)
    )


def _halves(axes: Sequence[_Axis]) -> list[tuple[int, list[_Axis]]]:
    """K and V along axis "2", or as the halves of axis "C"."""
    pair = next(axis for axis in axes if axis.letter in "2C")
    if pair.letter == "2":
        rest = [axis for axis in axes if axis is not pair]
        return [(0, rest), (pair.stride, rest)]
    channels = _Axis("D", pair.size // 2, pair.stride)
    rest = [channels if axis is pair else axis for axis in axes]
    return [(0, rest), (channels.size * pair.stride, rest)]


def _transposed(axes: Sequence[_Axis]) -> list[tuple[int, list[_Axis]]]:
    """vLLM CPU "vec": inside a head's [N, C], K as [D, N], then V as [N, D]."""
    *outer, tokens, pair = axes
    num_channels = pair.size // 2
    keys = [_Axis("D", num_channels, tokens.size), _Axis("N", tokens.size, 1)]
    values = [_Axis("N", tokens.size, num_channels), _Axis("D", num_channels, 1)]
    return [(0, [*outer, *keys]), (num_channels * tokens.size, [*outer, *values])]


def _plane(
    offset: int, axes: Sequence[_Axis], *, keys: bool, latent: bool, by_channel: bool
) -> Plane:
    axes = [axis for axis in axes if axis.size > 1] or [_Axis("D", 1, 1)]
    *outer, run = axes
    if run.stride != 1 or run.letter not in "DN":
        raise ValueError(f"8-bit encodings need tokens or channels innermost, got {axes}")
    # where tokens run innermost, a channel is a whole run of its own: it becomes a group
    grouped = TOKEN_AXES if by_channel else TOKEN_AXES + "D"
    groups = [axis for axis in outer if axis.letter not in grouped]
    rows = [axis for axis in outer if axis.letter in grouped]
    return Plane(
        keys=keys,
        latent=latent,
        groups=tuple(offset + start for start in _starts(groups)),
        rows=_starts(rows),
        width=run.size,
        column_scales=by_channel and run.letter == "D",
    )


def _starts(axes: Sequence[_Axis]) -> tuple[int, ...]:
    """Offset of every combination of indices, last axis fastest."""
    steps = [range(0, axis.size * axis.stride, axis.stride) for axis in axes]
    starts = tuple(sum(index) for index in product(*steps))
    assert len(starts) == prod(axis.size for axis in axes)
    return starts
