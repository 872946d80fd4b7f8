"""Gather and scatter on a GPU: kernels read and write the slots themselves, in one pass.

A slot is memory of the same device: the copy engines move it to the host and back, beside the
kernels of an engine, where a kernel that reaches over the bus would hold multiprocessors for as
long. Work is enqueued on the current stream; slots and blocks must stay as they are until it is
done.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, product

import torch

from prefixfleet.kernels.encoding import (
    Codec,
    Section,
    encoded_bytes,
    encoding_of,
    header,
    sections,
)
from prefixfleet.kernels.paged import PagedLayout, block_views, runs_of
from prefixfleet.kernels.slots import (
    Slot,
    addresses,
    as_bytes,
    check_distinct,
    check_headers,
    check_ids,
)
from prefixfleet.kernels.triton_kernels import seal_kernel
from prefixfleet.kernels.triton_launch import Batch, CopyLaunch, Pages, PlaneLaunch

_COUNT_WORD = 12  # of the header's 16 words: poisoned groups


class TritonMover:
    """Moves blocks of one set of caches in one encoding. Holds views of the caches.

    Raises:
        ValueError: the layout cannot be held in this encoding.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layout: PagedLayout,
        encoding: str = "exact",
    ) -> None:
        self._layout, self._encoding = layout, encoding_of(encoding)
        self._views = block_views(caches, layout)  # keeps alive what launches know by address
        self._device = self._views[0].device
        self._copies, self._planes = _launches(self._views, layout, encoding)
        self.payload_bytes = encoded_bytes(layout, encoding)
        self._header = b"" if self._encoding.is_exact else header(layout, self._encoding)
        self._template = torch.tensor(list(self._header), dtype=torch.uint8, device=self._device)

    def gather(self, block_ids: Sequence[int], outs: Sequence[Slot]) -> None:
        """As `reference.gather`, enqueued; slots start on 16-byte boundaries."""
        check_ids(self._layout, block_ids, len(outs))
        batch = self._batch(block_ids, [as_bytes(out, self.payload_bytes) for out in outs])
        if not len(batch.slots):
            return
        for copy in self._copies:
            copy.move(batch, to_slot=True)
        for plane in self._planes:
            plane.encode(batch)
        if self._header:
            seal_kernel[(len(batch.slots),)](
                batch.slots, self._template.view(torch.int32), batch.poisoned, COUNT_AT=_COUNT_WORD
            )

    def check(self, slots: Sequence[Slot]) -> None:
        """As `BlockMover.check`."""
        if self._header:
            check_headers([as_bytes(slot, self.payload_bytes) for slot in slots], self._header)

    def scatter(self, block_ids: Sequence[int], slots: Sequence[Slot]) -> None:
        """As `reference.scatter` of slots that `check` passed, enqueued; slots start on 16-byte
        boundaries.
        """
        check_ids(self._layout, block_ids, len(slots))
        check_distinct(block_ids)
        batch = self._batch(block_ids, [as_bytes(slot, self.payload_bytes) for slot in slots])
        if not len(batch.slots):
            return
        for copy in self._copies:
            copy.move(batch, to_slot=False)
        for plane in self._planes:
            plane.decode(batch)

    def _batch(self, block_ids: Sequence[int], slots: Sequence[torch.Tensor]) -> Batch:
        for slot in slots:
            if slot.device != self._device:
                raise ValueError(f"slot: got memory on {slot.device}, expected {self._device}")
        return Batch.on(self._device, block_ids, addresses(slots))


def _launches(
    views: Sequence[torch.Tensor], layout: PagedLayout, encoding: str
) -> tuple[list[CopyLaunch], list[PlaneLaunch]]:
    if encoding == "exact":
        return _exact_pages(views, layout), []
    alike: dict[tuple[object, ...], list[Section]] = defaultdict(list)
    for section in sections(layout, encoding_of(encoding)):
        view = views[section.page]
        alike[(section.plane, section.codec, view.dtype, view.stride(0))].append(section)
    copies, planes = [], []
    for like in alike.values():
        pages = Pages.of([section.page for section in like], views)
        dtype = views[like[0].page].dtype
        if like[0].codec is Codec.EXACT:
            copies.append(_exact_plane(pages, like, dtype.itemsize))
        else:
            planes.append(PlaneLaunch(pages, like, dtype))
    return copies, planes


def _exact_plane(pages: Pages, like: Sequence[Section], item: int) -> CopyLaunch:
    plane = like[0].plane
    runs = [(group + row) * item for group, row in product(plane.groups, plane.rows)]
    gap = like[0].end - like[0].data - plane.num_elements * item
    return CopyLaunch(pages, [s.data for s in like], runs, plane.width * item, gap)


def _exact_pages(views: Sequence[torch.Tensor], layout: PagedLayout) -> list[CopyLaunch]:
    starts = list(accumulate((page.page_bytes for page in layout.pages), initial=0))
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, view in enumerate(views):
        alike[(view.shape, view.stride(), view.dtype)].append(number)
    launches = []
    for numbers in alike.values():
        runs, run_bytes = runs_of(views[numbers[0]])
        pages = Pages.of(numbers, views)
        launches.append(CopyLaunch(pages, [starts[n] for n in numbers], runs, run_bytes))
    return launches
