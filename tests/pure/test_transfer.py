"""A rank's copies as byte extents: exactly the bytes of the positions asked for, in every plane of a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splash.core.memory import ArenaGeometry
from splash.core.spec import KVFormat, ModelSpec, RopeSpec
from splash.platform.base import Arenas, Completion, Rank
from splash.platform.cpu.copy import CpuCopyEngine
from splash.switch.manifest import RankCopies
from splash.switch.queued import QueuedCopies
from splash.switch.transfer import LayerCopies, merge_extents

SPEC = ModelSpec("test", 1, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())
PAGE, SLOTS, RANKS = 4, 24, 2


class Memory(Arenas):
    """Two ranks' arenas of one layer in this process, seen from rank 0."""

    def __init__(self, size: int) -> None:
        generator = np.random.default_rng(0)
        self.arrays = [generator.integers(0, 256, size).astype(np.uint8) for _ in range(RANKS)]

    def local(self, layer: int) -> torch.Tensor:
        return torch.from_numpy(self.arrays[0])

    def peer(self, rank: int, layer: int) -> torch.Tensor:
        return torch.from_numpy(self.arrays[rank])

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("kv", [KVFormat(24), KVFormat(24, 6)])
@given(data=st.data())
def test_copies_are_the_positions_asked_for(kv: KVFormat, data: st.DataObject) -> None:
    geometry = ArenaGeometry(SPEC, kv, PAGE, 4, RANKS, SLOTS)
    free = np.arange(geometry.num_weight_slots, SLOTS)
    slots = data.draw(st.permutations(free.tolist()))
    count = data.draw(st.integers(0, len(free) // 2))
    first = np.array(data.draw(st.lists(st.integers(0, PAGE - 1), min_size=count, max_size=count)), dtype=np.int64)
    last = np.array([PAGE if f == 0 else data.draw(st.integers(int(f) + 1, PAGE)) for f in first], dtype=np.int64)
    copies = RankCopies(
        peer=np.ones(count, dtype=np.int16),
        source=np.sort(np.array(slots[:count], dtype=np.int32)),
        target=np.sort(np.array(slots[count : 2 * count], dtype=np.int32)),
        first=first,
        last=last,
        staged=np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool),
        weights=((1, 1),),
        weights_staged=data.draw(st.booleans()),
    )
    memory = Memory(geometry.arena_bytes)
    want = memory.arrays[0].copy()
    for page in range(count):
        for offset, token_bytes in ((0, kv.latent_bytes), (PAGE * kv.latent_bytes, kv.indexer_bytes)):
            for position in range(first[page], last[page]):
                to, start = (
                    int(slot[page]) * geometry.slot_bytes + offset + position * token_bytes
                    for slot in (copies.target, copies.source)
                )
                want[to : to + token_bytes] = memory.arrays[1][start : start + token_bytes]
    for module in geometry.modules:
        offset, size = geometry.run(module, 1)
        want[offset : offset + size] = memory.arrays[1][offset : offset + size]
    group = Rank(0, RANKS, torch.device("cpu"), memory, None, None, None, CpuCopyEngine())  # type: ignore[arg-type]
    layer = LayerCopies(copies, geometry, group)
    layer.read(0)
    layer.write_back(0)
    assert np.array_equal(memory.arrays[0], want)
    assert layer.kv_bytes == int((last - first).sum()) * kv.token_bytes
    assert layer.weight_bytes == sum(geometry.run(module, 1)[1] for module in geometry.modules)


def test_whole_neighbours_become_one_extent() -> None:
    extents = np.array([(20, 120, 10), (0, 100, 20), (30, 140, 5)])
    assert merge_extents(extents).tolist() == [[0, 100, 30], [30, 140, 5]]


class Waited(Completion):
    """Copies that say when they are waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wait(self) -> None:
        self._log.append(self._name)


def test_a_step_waits_for_all_copies_but_the_last_of_the_switch_that_goes_on() -> None:
    """A slot that an order gave up may be written to while the copies of the next run, not while its own do."""
    log: list[str] = []
    copies = QueuedCopies()
    copies.add(1, Waited("first", log))
    assert copies.settle(1) == [] and log == []
    copies.add(1, Waited("second", log))
    copies.add(1, Waited("third", log))
    assert len(copies.settle(1)) == 2 and log == ["first", "second"]
    assert copies.settle(1) == []
    copies.add(1, Waited("fourth", log))
    assert len(copies.settle(2)) == 2, "another switch is under way, which knows nothing of these slots"
    assert log == ["first", "second", "third", "fourth"]
    copies.add(2, Waited("fifth", log))
    assert len(copies.settle(0)) == 1 and log[-1] == "fifth", "none is: a commit, or it was given up"
    assert copies.settle(0) == []
