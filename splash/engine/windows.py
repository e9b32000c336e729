"""Windows: which of the pages that are left a step plans ahead of a switch, and of how many layers they are copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splash.core.memory import ArenaGeometry
from splash.core.pages import PageTable
from splash.switch.manifest import Manifest, Occupancy, rank_copies


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


def layers_ahead(manifest: Manifest, geometry: ArenaGeometry, num_pages: int, window: int, step_bytes: int) -> int:
    """How many layers to copy ahead where the step that commits streams the others.

    About as many as the orders have bytes for that it takes to go over all pages anyway; the first at least, which
    nothing in that step could hide, and not the last.

    Args:
        manifest: of a first window.
        geometry: of the arenas.
        num_pages: pages that requests have written in all.
        window: the most that an order goes over.
        step_bytes: the most that a rank copies by an order.
    """
    group_bytes = geometry.attention_bytes // geometry.ranks
    in_all = max(1.0, num_pages / max(len(manifest.source_pT()), 1))
    layer_bytes = 0.0
    for rank in range(geometry.ranks):
        copies = rank_copies(manifest, geometry, rank)
        own = in_all * len(copies.peer) * geometry.slot_bytes + len(copies.weights) * group_bytes
        layer_bytes = max(layer_bytes, own)
    most = max(geometry.spec.num_layers - 1, 1)
    num_orders = max(-(-num_pages // window), 1)
    return min(max(round(num_orders * step_bytes / layer_bytes), 1), most) if layer_bytes else most


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
