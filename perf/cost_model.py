"""Predicted against measured: is the cost model right about steps, and does it know the fastest layout?

    python -m perf.cost_model --out perf/results/cpu-cost-model.json
    python -m perf.cost_model --grid accelerator model=deepseek_v3 model.num_layers=8 model.num_experts=64 \\
        load_format=dummy

Runs real steps on the platform that is usable here, in every layout, over a grid of batches, contexts, decode and
prefill, and compares each with the prediction from calibrated figures. Options that are not listed here are those of
`python -m splash.calibrate`. Calibrates first where no file is given. The ceiling is what the machine itself allows:
steps repeated later differ from the first by as much.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from perf.common import busy_cores, report
from splash.calibrate import calibrate, choose, read_settings
from splash.calibrate_steps import StepBench
from splash.core.hardware import load_calibration, with_figures
from splash.core.layout import Layout
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad

CLOSE = 1.1  # a layout this near the fastest counts as a right choice: repeats on a busy processor differ by as much
VERY_CLOSE = 1.03


class Grid(NamedTuple):
    """Batches and contexts of decode steps; requests, rows of each and history of prefill steps."""

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]

    def loads(self, ranks: int) -> dict[str, StepLoad]:
        """Loads by name."""
        loads = {
            f"decode {batch} x {context}": StepLoad.decode(batch, context, ranks) for batch, context in self.decode
        }
        return loads | {
            f"prefill {batch} x {rows} after {start}": StepLoad.prefill(batch, rows, start, ranks)
            for batch, rows, start in self.prefill
        }


GRIDS = {  # each small enough to be measured in a minute or two
    "cpu": Grid(
        ((1, 128), (1, 1024), (1, 4096), (8, 128), (8, 1024), (32, 128), (32, 512)),
        ((1, 128, 0), (1, 512, 0), (1, 512, 3584), (4, 128, 0), (4, 128, 896)),
    ),
    "accelerator": Grid(
        ((1, 1024), (1, 32768), (1, 131072), (4, 4096), (16, 1024), (16, 8192), (16, 32768), (64, 1024), (64, 8192),
         (128, 1024), (128, 4096), (256, 1024)),
        ((1, 256, 0), (1, 2048, 0), (1, 8192, 0), (1, 2048, 32768), (1, 8192, 65536), (4, 2048, 0), (16, 512, 0),
         (16, 512, 4096)),
    ),
}  # fmt: skip


def main() -> None:
    """Measure, compare, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", help="file of python -m splash.calibrate; left out, calibrates first")
    parser.add_argument("--grid", choices=GRIDS, default="cpu", help="which loads")
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each step")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("options", nargs="*", help="of splash.calibrate")
    args = parser.parse_intermixed_args()

    busy = busy_cores()
    settings = read_settings(args.options)
    platform, description = choose(settings.hardware)
    ranks = settings.ranks or platform.default_ranks()
    if args.calibration:
        found = load_calibration(args.calibration)
    else:
        found = calibrate(settings, lambda line: print(line, file=sys.stderr, flush=True))
    hardware = with_figures(description, found)
    loads, size = GRIDS[args.grid].loads(ranks), settings.page_size
    pages = max(int((load.context_q // size + 1).sum()) for load in loads.values())
    choice, form = settings.model, settings.load_format
    with StepBench(choice, form, platform, ranks, found.dtype, size, pages, 120.0) as bench:
        model = CostModel(bench.geometry.spec, hardware, ranks, found.dtype, size)
        rows = [_compare(bench, model, name, load, args.repeats) for name, load in loads.items()]

    errors = [abs(p / m - 1) for row in rows for p, m in row["ms"].values()]
    right = sum(row["chosen_over_best"] <= CLOSE for row in rows)
    nearly = sum(row["chosen_over_best"] <= VERY_CLOSE for row in rows)
    again = statistics.median(row["again"] for row in rows)
    print(f"median error {statistics.median(errors):.0%} (the same step measured again: {again:.0%})")
    print(
        f"fastest layout known, or within {CLOSE - 1:.0%}: {right} of {len(rows)} loads; {VERY_CLOSE - 1:.0%}: {nearly}"
    )
    result = {
        "model": settings.model.name,
        "options": args.options,
        "platform": platform.name,
        "dtype": found.dtype,
        "ranks": ranks,
        "others_busy_cores": busy,
        "median_error": round(statistics.median(errors), 3),
        "median_error_again": round(again, 3),
        "right_layout": right,
        "right_layout_within_3_percent": nearly,
        "loads": len(rows),
        "median_chosen_over_best": round(statistics.median(row["chosen_over_best"] for row in rows), 3),
        "rows": rows,
    }
    report("cost_model", result, args.out)


def _compare(bench: StepBench, model: CostModel, name: str, load: StepLoad, repeats: int) -> dict[str, Any]:
    predicted = model.steps(load)
    for layout in predicted:
        bench.measure(layout, load, 1)  # a load's first steps are slower in whichever layout has them
    measured: dict[Layout, float] = {layout: bench.measure(layout, load, repeats) for layout in predicted}
    chosen = min(predicted, key=lambda layout: predicted[layout].seconds)
    best = min(measured, key=lambda layout: measured[layout])
    again = abs(bench.measure(best, load, repeats) / measured[best] - 1)
    pairs = {
        layout.name: (round(predicted[layout].seconds * 1e3, 2), round(seconds * 1e3, 2))
        for layout, seconds in measured.items()
    }
    cells = "  ".join(f"{layout} {p:7.2f} /{m:7.2f}" for layout, (p, m) in pairs.items())
    print(f"{name:>26}  {cells} ms (predicted / measured)  chosen {chosen}, best {best}", flush=True)
    return {
        "load": name,
        "ms": pairs,
        "chosen": chosen.name,
        "best": best.name,
        "chosen_over_best": round(measured[chosen] / measured[best], 3),
        "again": round(again, 3),
    }


if __name__ == "__main__":
    main()
