"""How long planning a switch takes: the difference between two states of 65,536 pages on 8 ranks, every direction.

    python perf/ownership.py [pages] [ranks]

The aim is 20 ms in the slowest direction: a plan is made while steps run and must not hold one up. The floor is one
pass over the two holder matrices and the source matrix. Prints a line a direction, then one JSON line.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from splash.core.diff import diff
from splash.core.layout import LAYOUTS
from splash.core.ownership import State

AIM_MS = 20.0
REPETITIONS = 15
PAGES_A_REQUEST = 512


def median_ms(function: Callable[[], object]) -> float:
    function()
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(num_pages: int, ranks: int) -> None:
    page = np.arange(num_pages)
    numbers, request = page % PAGES_A_REQUEST, page // PAGES_A_REQUEST
    owners = request % ranks
    held, need = np.zeros((2, num_pages, ranks), dtype=bool)
    floor = median_ms(lambda: np.full(held.shape, -1, dtype=np.int16) * (need & ~held))

    def plan(src: str, dst: str) -> Callable[[], object]:
        # States are made anew each time: their holder matrices are part of the cost.
        return lambda: diff(State(LAYOUTS[src], ranks, numbers, owners), State(LAYOUTS[dst], ranks, numbers, owners))

    times = {f"{src}->{dst}": median_ms(plan(src, dst)) for src, dst in itertools.permutations(LAYOUTS, 2)}

    # Half of the pages are prefixes that a second request on another rank shares.
    claims = np.concatenate((page, page[::2]))
    sharers = np.concatenate((owners, (owners[::2] + 1) % ranks))

    def shared(src: str, dst: str) -> object:
        states = [State(LAYOUTS[name], ranks, numbers[claims], sharers, claims) for name in (src, dst)]
        return diff(*states)

    times["dp->cp, half shared"] = median_ms(lambda: shared("dp", "cp"))
    for direction, ms in times.items():
        print(f"{direction:>20} {ms:7.2f} ms")
    worst = max(times, key=lambda direction: times[direction])
    print(f"{'floor':>20} {floor:7.2f} ms\n{'aim':>20} {AIM_MS:7.2f} ms")
    result = {"pages": num_pages, "ranks": ranks, "aim_ms": AIM_MS, "floor_ms": round(floor, 3), "worst": worst}
    print(json.dumps({"bench": "ownership", **result, "worst_ms": round(times[worst], 3)}))


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*(arguments + [65536, 8][len(arguments) :]))
