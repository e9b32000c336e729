"""How long planning a whole switch takes: 65,536 pages on 8 ranks, every direction.

    python -m perf.manifest [pages] [ranks]

A plan is made while steps run, between two of them, so it has to take milliseconds. The floor is the difference of the
two ownership states alone, whose aim is 20 ms; the manifest adds the slot of every page on every rank. What the engine
and the ranks do with a manifest before they obey it (check, count, hash) is timed for the slowest direction. Prints a
line a direction, then one JSON line.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from splash.core.diff import diff
from splash.core.layout import LAYOUTS, Layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import State
from splash.core.pages import HeldPages, PagePool
from splash.core.spec import ModelSpec, RopeSpec, kv_format
from splash.switch.checks import validate
from splash.switch.counts import count
from splash.switch.manifest import Occupancy, plan_switch, rank_copies

AIM_MS = 50.0
DIFF_AIM_MS = 20.0
REPETITIONS = 9
PAGES_A_REQUEST = 512
PAGE_SIZE = 64

DEEPSEEK_LIKE = ModelSpec(
    architecture="DeepseekV3ForCausalLM",
    num_layers=61,
    hidden_size=7168,
    vocab_size=129280,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    first_dense_layers=3,
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
)


def fastest_ms(function: Callable[[], object]) -> float:
    """The least of several processor times of one thread: other processes and first touches of memory only add."""
    function()
    times = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def arenas(num_pages: int, ranks: int) -> ArenaGeometry:
    """Arenas in which every page fits on every rank beside all weights, with an eighth to spare."""
    kv = kv_format(DEEPSEEK_LIKE, "bfloat16")
    weights = ArenaGeometry(DEEPSEEK_LIKE, kv, PAGE_SIZE, 2, ranks, num_slots=1 << 40).num_weight_slots
    return ArenaGeometry(DEEPSEEK_LIKE, kv, PAGE_SIZE, 2, ranks, num_slots=weights + num_pages * 9 // 8)


def fill(geometry: ArenaGeometry, layout: Layout, num_pages: int) -> Occupancy:
    """Requests that grew side by side, a few pages at a time, each with its last page partly written."""
    pool = PagePool.of_geometry(geometry, layout)
    num_requests = -(-num_pages // PAGES_A_REQUEST)
    held = [HeldPages(request % geometry.ranks, geometry.ranks) for request in range(num_requests)]
    sizes = [min(PAGES_A_REQUEST, num_pages - request * PAGES_A_REQUEST) for request in range(num_requests)]
    while any(len(pages) < size for pages, size in zip(held, sizes, strict=True)):
        for pages, size in zip(held, sizes, strict=True):
            assert pool.grow(pages, min(32, size - len(pages)))
    return Occupancy(
        layout=layout,
        requests=tuple(range(num_requests)),
        owners=tuple(pages.owner for pages in held),
        written=tuple(size * PAGE_SIZE - 1 for size in sizes),
        tables=tuple(pages.table for pages in held),
    )


def main(num_pages: int, ranks: int) -> None:
    geometry = arenas(num_pages, ranks)
    occupancies = {name: fill(geometry, layout, num_pages) for name, layout in LAYOUTS.items()}
    numbers, request = np.arange(num_pages) % PAGES_A_REQUEST, np.arange(num_pages) // PAGES_A_REQUEST

    plans, diffs = {}, {}
    for src, dst in itertools.permutations(LAYOUTS, 2):
        before = occupancies[src]

        def plan(before: Occupancy = before, dst: str = dst) -> object:
            return plan_switch(before, LAYOUTS[dst], before.owners, geometry, epoch=0)

        def difference(src: str = src, dst: str = dst) -> object:
            return diff(*(State(LAYOUTS[name], ranks, numbers, request % ranks) for name in (src, dst)))

        plans[src, dst], diffs[src, dst] = fastest_ms(plan), fastest_ms(difference)
        print(f"{src + ' -> ' + dst:>20} {plans[src, dst]:7.2f} ms, of which the difference {diffs[src, dst]:6.2f} ms")
    worst = max(plans, key=lambda direction: plans[direction])
    print(f"{'aim':>20} {AIM_MS:7.2f} ms, of which the difference {DIFF_AIM_MS:6.2f} ms")

    before = occupancies[worst[0]]
    manifest = plan_switch(before, LAYOUTS[worst[1]], before.owners, geometry, epoch=0).manifest
    uses = {
        "validate": fastest_ms(lambda: validate(manifest, geometry)),
        "count": fastest_ms(lambda: count(manifest, geometry)),
        "digest": fastest_ms(manifest.digest),
        "rank_copies": fastest_ms(lambda: rank_copies(manifest, geometry, 0)),
    }
    for name, ms in uses.items():
        print(f"{name + ', ' + ' -> '.join(worst):>20} {ms:7.2f} ms")
    result = {
        "pages": num_pages,
        "ranks": ranks,
        "aim_ms": AIM_MS,
        "worst": "->".join(worst),
        "worst_ms": round(plans[worst], 3),
        "diff_aim_ms": DIFF_AIM_MS,
        "worst_diff_ms": round(max(diffs.values()), 3),
        **{f"{name}_ms": round(ms, 3) for name, ms in uses.items()},
    }
    print(json.dumps({"bench": "manifest", **result}))


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*(arguments + [65536, 8][len(arguments) :]))
