"""What a group of ranks on GPUs shares: collectives, arenas that peers read, and copies in and behind the stream."""

from __future__ import annotations

import numpy as np
import pytest

from splash.core.memory import ArenaGeometry
from splash.core.spec import ModelSpec, RopeSpec, kv_format
from tests.cpu.group import run_group
from tests.gpu.programs import COUNTS, MOVED, SUMMED, arena_bytes

pytestmark = pytest.mark.gpu
HERE = "tests.gpu.programs"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_collectives(ranks: int) -> None:
    want = len(COUNTS) * 2 * (len(MOVED) + len(SUMMED))
    assert run_group(f"{HERE}:collectives", ranks, platform="cuda") == [want] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_read_their_peers(ranks: int) -> None:
    spec = ModelSpec("test", 3, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())
    geometry = ArenaGeometry(spec, kv_format(spec, "float32"), 16, 4, ranks, num_slots=257)
    size = geometry.arena_bytes
    extents = [(0, 64, 7), (11, 1000, 1), (4096, 8, 4096), (size - 100, 0, 100)]
    arguments = {"num_layers": 3, "extents": extents}
    results = run_group(
        f"{HERE}:read_peers", ranks, arguments, num_layers=3, geometry=geometry, platform="cuda", timeout_s=120.0
    )
    for got in results:
        for peer in range(ranks):
            for layer in range(3):
                want = np.zeros(size, dtype=np.uint8)
                source = arena_bytes(peer, layer, size)
                for to, start, length in extents:
                    want[to : to + length] = source[start : start + length]
                assert got[peer * 3 + layer] == want.tobytes(), f"layer {layer} of rank {peer}"


def test_work_that_cannot_be_queued_fails_at_once() -> None:
    assert run_group(f"{HERE}:failing_work", 1, platform="cuda") == ["the mapping is gone"]


def test_a_rank_that_does_not_come_is_named() -> None:
    from tests.cpu.group import GroupError

    with pytest.raises(GroupError, match="rank 1 did not arrive within 2 s"):
        run_group("tests.gpu.test_platform:meet", 2, platform="cuda", collective_timeout_s=2.0)


def meet(rank: object) -> None:
    """Rank 1 stays away."""
    if rank.rank == 0:  # type: ignore[attr-defined]
        rank.comm.barrier()  # type: ignore[attr-defined]
