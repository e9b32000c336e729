"""Time the experts with different tiles, each beside the others in one run, by how many rows choose which experts.

    python -m perf.experts [--rows 1 16 64 128 256] [--routing uniform same wide] [--tiles NAME ...] [--out FILE]

Shapes are those of DeepSeek-V3's experts, 32 of 64 of them here, eight a row. Routing: `uniform`, every row chooses by
itself; `same`, all rows choose the same eight, of which `--hot` are here; `wide`, a few experts are chosen often and
most seldom. `chosen` are the tiles that the engine takes; `one height` those without a choice on the device.

The floor is the bytes of the experts that are touched over the rate of a copy, or the products' operations over the
rate of a large one. Every result is checked against plain products before it is timed, and tiles take turns: figures
are medians over rounds, `spread` the largest over the smallest of the first tiles' rounds. Without a GPU, `--tiny`
with TRITON_INTERPRET=1 shows that all of it works.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perf.common import report
from perf.gpu import DEVICE, DTYPE, HAS_GPU, ceilings, error, in_turns, rounded, show
from splash.platform.triton.experts import GroupedTiles
from splash.platform.triton.experts import experts as run_experts
from splash.platform.triton.kernels import expert_tiles
from splash.platform.triton.launch import target_of

ROUTINGS = ("uniform", "same", "wide")
TilePair = tuple[GroupedTiles, GroupedTiles]


@dataclass(frozen=True)
class Shape:
    """Of the experts: hidden size, intermediate size, how many there are and how many here, and choices of a row."""

    dim: int
    width: int
    total: int
    local: int
    top_k: int


DEEPSEEK, TINY = Shape(7168, 2048, 64, 32, 8), Shape(64, 32, 8, 4, 2)


def tile_sets(shape: Shape, num_rows: int) -> dict[str, TilePair]:
    """Tiles of the products with w13 and w2, by name; the engine's choice first."""
    rows_an_expert = num_rows * shape.top_k / shape.local
    sets = {"chosen": expert_tiles(target_of(torch.device(DEVICE)), DTYPE, rows_an_expert, num_rows)}
    if not HAS_GPU:
        tiles = GroupedTiles((16,), 32, 32, warps=4, stages=(1,))
        several = replace(tiles, heights=(16, 32), stages=(1, 1))
        return sets | {"one height": (tiles, tiles), "heights": (several, several)}
    one = partial(GroupedTiles, columns=64, depth=128, warps=4, tma=True, swap=True)
    low, high = one((16,), stages=(4,)), one((32,), stages=(4,))
    sets["one height"] = (low, low) if rows_an_expert <= 8 else (high, high)
    tall = one((128,), stages=(3,))
    sets["tall"] = (tall, tall)
    heights = (16, 32, 64, 128)
    narrow = one(heights, stages=(4, 4, 4, 3))
    wide_down = replace(narrow, columns=128, depth=64, stages=(5, 5, 4, 3))
    two_up, two_down = replace(narrow, depth=64, stages=(5, 5, 4, 3)), replace(narrow, depth=64, stages=(8, 8, 6, 4))
    return sets | {
        "heights": (narrow, narrow),
        "heights, wide down": (narrow, wide_down),
        "heights, two programs a processor": (two_up, two_down),
        "heights, two programs, wide down": (two_up, wide_down),
    }


def choices(shape: Shape, num_rows: int, routing: str, hot: int) -> torch.Tensor:
    """Experts of each row: int64 [rows, top_k], of which those below `shape.local` are here."""
    if routing == "same":
        ids = [*range(hot), *range(shape.local, shape.local + shape.top_k - hot)]
        return torch.tensor(ids, device=DEVICE).expand(num_rows, -1).contiguous()
    odds = torch.ones(shape.total, device=DEVICE)
    if routing == "wide":  # Zipf's law over experts in any order
        odds = 1 / (1 + torch.randperm(shape.total, device=DEVICE))
    return odds.expand(num_rows, -1).multinomial(shape.top_k)


def plain(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> Any:
    """The same by one product after another, summed in float32."""
    want = torch.zeros_like(x, dtype=torch.float32)
    for e in range(len(w13)):
        row_n, place_n = (expert == e).nonzero(as_tuple=True)
        if len(row_n):
            gate, up = (x[row_n] @ w13[e].t()).chunk(2, dim=-1)
            product = (torch.nn.functional.silu(gate) * up) @ w2[e].t()
            want.index_add_(0, row_n, product.float() * weight[row_n, place_n, None])
    return want


def measure(
    shape: Shape,
    limits: dict[str, float],
    rows: Sequence[int],
    routings: Sequence[str],
    hot: int,
    names: Sequence[str] | None,
    rounds: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """A row for each number of rows, routing and tiles."""
    dim, width = shape.dim, shape.width
    w13 = torch.randn(shape.local, 2 * width, dim, device=DEVICE, dtype=DTYPE) * dim**-0.5
    w2 = torch.randn(shape.local, dim, width, device=DEVICE, dtype=DTYPE) * width**-0.5
    found = []
    for num_rows in rows:
        x, weight = torch.randn(num_rows, dim, device=DEVICE, dtype=DTYPE), torch.rand(num_rows, shape.top_k)
        weight = weight.to(DEVICE)
        sets = {name: pair for name, pair in tile_sets(shape, num_rows).items() if not names or name in names}
        for routing in routings:
            expert = choices(shape, num_rows, routing, hot)
            counts = expert[expert < shape.local].bincount(minlength=shape.local)
            touched, pairs = int((counts > 0).sum()), int(counts.sum())
            if not touched:
                continue
            calls: dict[str, Callable[[], object]] = {}
            want = plain(x, expert, weight, w13, w2)
            for name, (up, down) in sets.items():
                calls[name] = partial(run_experts, x, expert, weight, w13, w2, 0, None, up, down)
                error(run_experts(x, expert, weight, w13, w2, 0, None, up, down), want)
            times = in_turns(calls, repeats, rounds)
            flops, moved = 6 * pairs * dim * width, touched * 6 * dim * width
            floor = max(flops / limits["gemm_tflop_s"] / 1e9, moved / limits["copy_gb_s"] / 1e6)
            first = next(iter(times.values()))
            for name, values in times.items():
                ms = statistics.median(values)
                row: dict[str, Any] = {"tiles": name, "rows": num_rows, "routing": routing, "experts": touched}
                row |= {"most_rows": int(counts.max()), "ms": ms, "floor_ms": floor, "of_floor": floor / ms}
                row |= {"of_first": statistics.median(first) / ms, "spread": max(first) / min(first)}
                show(row)
                found.append(rounded(row))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.experts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--tiles", nargs="+", help="names of tile sets; all where left out")
    parser.add_argument(
        "--hot", type=int, help="of the experts that all rows choose, how many are here: half by default"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of all tiles")
    parser.add_argument("--repeats", type=int, default=20, help="of each in a turn")
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, for trying the benchmark itself")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    options = parser.parse_args(arguments)
    shape = TINY if options.tiny else DEEPSEEK
    known = tile_sets(shape, 128)
    for name in options.tiles or ():
        if name not in known:
            parser.error(f"--tiles: {name!r} is none of {', '.join(map(repr, known))}")
    hot = shape.top_k // 2 if options.hot is None else options.hot
    if not 0 < hot <= shape.top_k:
        parser.error(f"--hot: {hot} is not between 1 and {shape.top_k}")
    torch.manual_seed(0)
    with torch.inference_mode():
        limits = ceilings()
        print(f"ceilings: copy {limits['copy_gb_s']:.0f} GB/s, bf16 product {limits['gemm_tflop_s']:.0f} TFLOP/s")
        rows = measure(
            shape, limits, options.rows, options.routing, hot, options.tiles, options.rounds, options.repeats
        )
    settings = {"hot": hot, "rounds": options.rounds, "tiny": options.tiny}
    report("experts", {**settings, "ceilings": rounded(limits), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
