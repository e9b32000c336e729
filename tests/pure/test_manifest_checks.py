"""What `validate` refuses, each by its own name, and that a manifest's digest covers everything in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from splash.core.diff import NO_SOURCE
from splash.core.layout import CP, DCP, DP, TP
from splash.switch.checks import validate
from splash.switch.counts import count
from splash.switch.manifest import Manifest, rank_copies, settle
from tests.arenas import fixed_case, tiny_geometry


def altered(name: str, change: Callable[[np.ndarray], None], dtype: type = np.int32) -> Callable[[Manifest], Manifest]:
    """A manifest with one of its arrays, [p, 4], changed in place."""

    def corrupt(manifest: Manifest) -> Manifest:
        array = np.frombuffer(getattr(manifest, name), dtype=dtype).reshape(-1, 4).copy()
        change(array)
        return msgspec.structs.replace(manifest, **{name: array.tobytes()})

    return corrupt


def replaced(**fields: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: msgspec.structs.replace(manifest, **fields)


def put(row: int, rank: int, value: int) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[row, rank] = value

    return change


def copy_slot(row: int, of: int, rank: int) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[row, rank] = array[of, rank]

    return change


def swap_groups(manifest: Manifest) -> Manifest:
    """Fetch head group 0 from rank 2 on rank 1, though rank 2 has it not."""
    rows = [list(row) for row in manifest.weight_sources]
    rows[0][1] = 2
    return msgspec.structs.replace(manifest, weight_sources=tuple(map(tuple, rows)))


# Of dcp -> dp with five pages and more a request: rank 0 holds row 0 (request 10, page 0) before and rows 0 to 4 after.
CORRUPTIONS: dict[str, Callable[[Manifest], Manifest]] = {
    "both layouts exist": replaced(source="up"),
    "it is for all ranks": replaced(weights_settled=(False,) * 3),
    "no request is named twice": replaced(requests=(10, 11, 12, 12)),
    "each request has all its fields": replaced(owners=(0, 1, 2)),
    "each page of a request is claimed": replaced(pages=bytes(4)),
    "owners are ranks": replaced(owners=(0, 1, 2, 4)),
    "each request has as many pages as it has written": replaced(written=(19, 31, 11, 27)),
    "arrays have an entry a page and rank": replaced(settled=bytes(8)),
    "pages are wanted where the target layout has them": altered("target_slots", put(0, 1, 30)),
    "pages are held where the source layout has them": altered("source_slots", put(0, 1, 30)),
    "a page that is fetched has a source": altered("sources", put(1, 0, NO_SOURCE), np.int16),
    "nothing that is resident or unwanted is fetched": altered("sources", put(0, 0, 1), np.int16),
    "a source holds what it is asked for": altered("sources", put(1, 0, 2), np.int16),
    "no more of a page is settled than is written": altered("settled", put(4, 0, 4), np.int16),
    "weights have an entry a head group and rank": replaced(weight_sources=((NO_SOURCE,) * 4,)),
    "head groups that are missing are fetched, and no others": replaced(weight_sources=((NO_SOURCE,) * 4,) * 4),
    "head groups are fetched from ranks": replaced(
        weight_sources=tuple(tuple(-1 if g == r else 4 for r in range(4)) for g in range(4))
    ),
    "a source holds the head group it is asked for": swap_groups,
    "pages lie inside the arena after, on rank 0": altered("target_slots", put(0, 0, 10_000)),
    "no page lies on weights after, on rank 0": altered("target_slots", put(0, 0, 0)),
    "no page lies on weights before, on rank 0": altered("source_slots", put(0, 0, 0)),
    "no slot has two pages after, on rank 0": altered("target_slots", copy_slot(0, 1, 0)),
    "no slot has two pages before, on rank 0": altered("source_slots", copy_slot(0, 4, 0)),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_validate_names_what_is_wrong(message: str) -> None:
    case = fixed_case(DCP, DP)
    manifest = case.plan().manifest
    validate(manifest, case.geometry)
    with pytest.raises(ValueError, match=f"^manifest of .* -> dp: not so: {message}$"):
        validate(CORRUPTIONS[message](manifest), case.geometry)


def test_validate_refuses_to_settle_or_abandon_what_is_staged() -> None:
    # Every slot is in use, and some of the pages that rank 0 goes on holding lie where weights will.
    slots = len(tiny_geometry(4, num_heads=24, page_size=4, token_bytes=8, spare=12).page_slots(TP, 0))
    case = fixed_case(TP, CP, spare=12, pages=(slots - 3,), reserved=0)
    manifest = case.plan().manifest
    rank = next(rank for rank in range(4) if count(manifest, case.geometry).staged[rank])
    copies = rank_copies(manifest, case.geometry, rank)
    row = int(np.flatnonzero(manifest.target_pT()[:, rank] == copies.target[copies.staged][0])[0])
    settled = np.zeros_like(manifest.settled_pT())
    settled[row, rank] = 1
    with pytest.raises(ValueError, match=f"what is staged cannot be settled, on rank {rank}"):
        validate(settle(manifest, settled, [False] * 4), case.geometry)
    with pytest.raises(ValueError, match="staged copies make it not abandonable, on rank"):
        validate(msgspec.structs.replace(manifest, abandonable=True), case.geometry)


def test_validate_refuses_weights_that_are_settled_under_a_page() -> None:
    case = fixed_case(DCP, CP, spare=6, pages=(12, 12, 12), reserved=0)
    manifest = case.plan().manifest
    rank = next(rank for rank in range(4) if rank_copies(manifest, case.geometry, rank).weights_staged)
    settled = [other == rank for other in range(4)]
    with pytest.raises(ValueError, match=f"weights that are staged cannot be settled, on rank {rank}"):
        validate(settle(manifest, manifest.settled_pT(), settled), case.geometry)


def test_validate_refuses_shards_of_heads_that_do_not_divide() -> None:
    case = fixed_case(DP, CP)
    manifest = case.plan().manifest
    odd = tiny_geometry(4, num_heads=5, page_size=4, token_bytes=8, spare=40)
    with pytest.raises(ValueError, match="the ranks divide the heads of a layout that shards them"):
        validate(msgspec.structs.replace(manifest, target="tp"), odd)


def test_digest_differs_when_anything_does() -> None:
    case = fixed_case(DCP, DP)
    manifest = case.plan().manifest
    assert case.plan().manifest.digest() == manifest.digest()
    changed = [
        replaced(epoch=8),
        replaced(source="tp"),
        replaced(target="tp"),
        replaced(requests=(11, 10, 12, 13)),
        replaced(source_owners=(1, 0, 2, 3)),
        replaced(owners=(1, 0, 2, 3)),
        replaced(written=(18, *manifest.written[1:])),
        replaced(first=(1, *manifest.first[1:])),
        replaced(prepared=1),
        replaced(num_pages=manifest.num_pages[::-1]),
        replaced(pages=manifest.pages[::-1]),
        altered("source_slots", put(0, 0, 1)),
        altered("target_slots", put(0, 0, 1)),
        altered("sources", put(0, 0, 1), np.int16),
        altered("settled", put(0, 0, 1), np.int16),
        swap_groups,
        replaced(weights_settled=(False, False, False, True)),
        replaced(abandonable=not manifest.abandonable),
    ]
    assert len(changed) == len(manifest.__struct_fields__)
    digests = {manifest.digest(), *(change(manifest).digest() for change in changed)}
    assert len(digests) == len(changed) + 1
    assert all(0 <= digest < 2**63 for digest in digests)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest).digest() == manifest.digest()
