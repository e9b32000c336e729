"""Windows: which of the pages that are left a step plans ahead of a switch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splash.core.pages import PageTable
from splash.switch.manifest import Occupancy


def cut_out(
    occupancy: Occupancy, begins: Sequence[int], whole: Sequence[bool], page_size: int, ranks: int, window: int | None
) -> tuple[Occupancy, list[int]]:
    """The pages of some requests from one on, in order.

    Args:
        occupancy: all pages of all requests.
        begins: by request, the page to begin with.
        whole: by request, whether it is there with all pages in any case.
        page_size: token positions a page.
        ranks: T.
        window: how many of the pages that are written, of requests that are not whole; all pages where left out.

    Returns:
        the pages, and the indices of the requests that they are of.
    """
    left = None if window is None else _shares(occupancy, begins, whole, page_size, ranks, window)
    chosen, ends, written = [], [], []
    for index, (begin, table) in enumerate(zip(begins, occupancy.tables, strict=True)):
        end, positions = len(table), occupancy.written[index]
        if left is not None and not whole[index]:
            owner = occupancy.owners[index]
            end = min(-(-positions // page_size), begin + left[owner])
            positions = min(positions, end * page_size)
            left[owner] -= end - begin
            if end == begin:
                continue
        chosen.append(index)
        ends.append(end)
        written.append(positions)
    assert occupancy.pages is not None
    spans = [(index, slice(begins[index], end)) for index, end in zip(chosen, ends, strict=True)]
    rest = replace(
        occupancy,
        requests=tuple(occupancy.requests[index] for index in chosen),
        owners=tuple(occupancy.owners[index] for index in chosen),
        written=tuple(written),
        tables=tuple(PageTable(ranks, occupancy.tables[index].slots_cT[span]) for index, span in spans),
        pages=tuple(occupancy.pages[index][span] for index, span in spans),
        first=tuple(begins[index] for index in chosen),
    )
    return rest, chosen


def _shares(
    occupancy: Occupancy, begins: Sequence[int], whole: Sequence[bool], page_size: int, ranks: int, window: int
) -> list[int]:
    """By owner, how many pages of a window are of its requests: as many of each, so that no rank only sends."""
    left = [0] * ranks
    for index, (owner, written) in enumerate(zip(occupancy.owners, occupancy.written, strict=True)):
        if not whole[index]:
            left[owner] += -(-written // page_size) - begins[index]
    shares, owners = [0] * ranks, [owner for owner, num in enumerate(left) if num]
    for turn, owner in enumerate(sorted(owners, key=left.__getitem__)):
        shares[owner] = min(left[owner], window // (len(owners) - turn))
        window -= shares[owner]
    return shares
