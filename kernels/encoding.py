"""Encodings of a block: their names, the bytes of an encoded payload.

Must not touch tensors. An exact payload is the block's bytes and nothing else. Any other payload
describes itself: 64 bytes of header, then a segment a page, and in it a section a plane, each
its float32 scales and its elements (groups, rows, run), every part on a 16-byte boundary.

A group of finite values x is held as q with one scale s, x ~ q * s, s = max|x| / LARGEST: zeros
come back as zeros, values below s / 2 as zero (FP8: s / 1024), an outlier costs its own group
resolution and no other's; s is at least 2**-126, so what is smaller is zero. A group with a NaN,
an infinity or a magnitude of 2**127 and more **poisons** its block: 8 bits cannot hold it, the
header counts it, `check_payload` refuses it, and it is recomputed instead.
"""

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum

import torch

from prefixfleet.kernels.paged import Content, PagedLayout
from prefixfleet.kernels.planes import Plane, split


class Codec(StrEnum):
    """How one plane's elements are held."""

    EXACT = "exact"
    FP8 = "fp8"  # e4m3fn: sign, 4 bits of exponent, 3 of mantissa
    INT8 = "int8"  # -127 to 127


LARGEST = {Codec.FP8: 448.0, Codec.INT8: 127.0}
SMALLEST_SCALE = 2.0**-126
LIMIT = 2.0**127
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

HEADER = struct.Struct("<8s16s16sQI12x")  # magic, encoding, layout, payload bytes, poisoned groups
_MAGIC = b"pfkv8\0\0\x01"
_ALIGN = 16
assert HEADER.size == 64


@dataclass(frozen=True, slots=True)
class Encoding:
    """What an operator chooses by name; the name goes into `Namespace.encoding`."""

    name: str
    keys: Codec
    values: Codec
    channel_keys: bool = False  # one scale a channel of K, not one a head

    @property
    def is_exact(self) -> bool:
        """Nothing is lost; the payload has no header."""
        return self.keys is self.values is Codec.EXACT


_ALL = (
    Encoding("exact", Codec.EXACT, Codec.EXACT),
    Encoding("fp8-values", Codec.EXACT, Codec.FP8),
    Encoding("int8-fp8", Codec.INT8, Codec.FP8, channel_keys=True),
    Encoding("int8", Codec.INT8, Codec.INT8, channel_keys=True),
    Encoding("fp8", Codec.FP8, Codec.FP8),
)
ENCODINGS = {encoding.name: encoding for encoding in _ALL}
"""By name. Scales of K per channel halve INT8's error and gain FP8 a fifth (tests/bench/quality):
not worth FP8 their bytes. V is better in FP8 than in INT8 at the same size."""


def encoding_of(name: str) -> Encoding:
    """The encoding called ``name``. Raises `ValueError`, with the names there are."""
    if name not in ENCODINGS:
        raise ValueError(f"encoding: got {name!r}, expected one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


@dataclass(frozen=True, slots=True)
class Section:
    """One plane inside an encoded payload; offsets in bytes from the payload's start.

    What lies between the last scale and the data, and between the data and the end, is zero.
    """

    page: int
    plane: Plane
    codec: Codec
    scales: int
    data: int
    end: int


def sections(layout: PagedLayout, encoding: Encoding) -> tuple[Section, ...]:
    """The sections of an encoded payload, page after page.

    Raises:
        ValueError: exact (it has no sections), pages that are opaque, already 8 bits wide, or
            MLA's latent where K is to stay exact and V is not.
    """
    if encoding.is_exact:
        raise ValueError("an exact payload has no sections")
    found: list[Section] = []
    end = HEADER.size
    for index, page in enumerate(layout.pages):
        if page.dtype not in FLOATS:
            raise ValueError(f"encoding {encoding.name!r}: got pages of {page.dtype}; set 'exact'")
        if layout.content is Content.LATENT and encoding.keys is Codec.EXACT:
            raise ValueError(f"encoding {encoding.name!r}: MLA's latent is K and V in one")
        for plane in split(page, layout.content, channel_keys=encoding.channel_keys):
            codec = encoding.keys if plane.keys else encoding.values
            exact = codec is Codec.EXACT
            data = _aligned(end + (0 if exact else 4 * plane.num_scales))
            size = plane.num_elements * (page.dtype.itemsize if exact else 1)
            found.append(Section(index, plane, codec, end, data, _aligned(data + size)))
            end = found[-1].end
    return tuple(found)


def encoded_bytes(layout: PagedLayout, encoding: str) -> int:
    """Bytes of one block's payload under ``encoding``, all layers of this rank."""
    if encoding_of(encoding).is_exact:
        return layout.block_bytes
    return sections(layout, encoding_of(encoding))[-1].end


def header(layout: PagedLayout, encoding: Encoding) -> bytes:
    """The first 64 bytes of an encoded payload that nothing poisoned."""
    size = encoded_bytes(layout, encoding.name)
    return HEADER.pack(_MAGIC, encoding.name.encode(), _layout_digest(layout), size, 0)


def poisoned_header(clean: bytes, groups: int) -> bytes:
    """The header ``clean`` for a payload with ``groups`` poisoned groups."""
    return HEADER.pack(*HEADER.unpack(clean)[:-1], groups)


def is_storable(payload: bytes | memoryview, encoding: str) -> bool:
    """Whether a gathered payload may be published; False if it was poisoned (see the module)."""
    if encoding_of(encoding).is_exact:
        return True
    return int(HEADER.unpack_from(payload)[-1]) == 0


def check_payload(payload: bytes, expected_header: bytes) -> None:
    """Raises `ValueError` unless ``payload`` says that it is what the reader will decode."""
    got = payload[: HEADER.size]
    if got != expected_header:
        raise ValueError(
            f"encoded block: got header {HEADER.unpack(got)}, "
            f"expected {HEADER.unpack(expected_header)}"
        )


def _layout_digest(layout: PagedLayout) -> bytes:
    return hashlib.blake2b(layout.describe().encode(), digest_size=16).digest()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
