"""Time between tokens with each step planned while the one before runs, and with each planned after the one before.

    python -m perf.hot_loop --cases 4x64x64
    python -m perf.hot_loop --cases 16x1024x64,128x1024x64 +hardware=h200 ranks=2 model=deepseek_v3 \\
        model.num_layers=8 model.num_experts=64 load_format=dummy dtype=bfloat16 --copy-gb-s 4100

A case is REQUESTSxINPUTxOUTPUT: so many requests that arrive together. What is not an option here is an option of
`python -m splash.serve`. Two engines serve every case, one after the other, each twice; the second time counts. A
figure is the median time between two answers of the ranks once all requests are past their first token, as a caller of
the engine sees it, with the share of it in which rank 0's device does not compute the forward. The ceiling is the bytes
that a step must read over the rate of a copy (`--copy-gb-s`, from `perf.step`), with the weights spread over the ranks
and, in `tp`, every rank reading all of the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from perf.common import busy_cores, report
from perf.layouts import Case, case_of, serve, summarise
from perf.step import decode_bytes
from splash.core.spec import DTYPE_BYTES, ModelSpec
from splash.engine.config import EngineConfig
from splash.engine.engine import Engine
from splash.serve import read_options


def bound_ms(spec: ModelSpec, config: EngineConfig, ranks: int, case: Case, copy_gb_s: float) -> float:
    """What the bytes of a step allow, in milliseconds."""
    element, context = DTYPE_BYTES[config.dtype], case.input + case.output // 2
    weights = decode_bytes(spec, element, case.requests, 0)
    cache = decode_bytes(spec, element, case.requests, context) - weights
    return (weights / ranks + cache / (1 if config.layout == "tp" else ranks)) / (copy_gb_s * 1e6)


def measure(config: EngineConfig, cases: list[Case], copy_gb_s: float | None) -> list[dict[str, Any]]:
    """A row for each case."""
    rows: list[dict[str, Any]] = [{"case": str(case)} for case in cases]
    for is_async in (False, True):
        name = "async" if is_async else "sync"
        chosen = dataclasses.replace(config, async_scheduling=is_async)
        engine = Engine(chosen, lambda line: print(line, file=sys.stderr, flush=True))
        try:
            for seed, (row, case) in enumerate(zip(rows, cases, strict=True)):
                serve(engine, case, seed)
                figures = summarise(case, [serve(engine, case, 100 + seed)])
                row[f"{name}_ms"], row[f"{name}_host_share"] = figures["step_ms"], figures["host_share"]
                if copy_gb_s is not None:
                    spec, ranks = engine.model_config.spec, engine.ranks
                    row["bound_ms"] = round(bound_ms(spec, config, ranks, case, copy_gb_s), 3)
        finally:
            engine.close()
    for row in rows:
        row["ratio"] = round(row["async_ms"] / row["sync_ms"], 4)
        print(
            f"{row['case']:>14}: {row['sync_ms']:.3f} ms between tokens, {row['async_ms']:.3f} ms planned ahead, ratio "
            f"{row['ratio']:.3f}; the host's share {row['sync_host_share']:.3f} and {row['async_host_share']:.3f}; "
            f"bytes bound {row.get('bound_ms', float('nan')):.3f} ms"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: [case_of(part) for part in text.split(",")], required=True)
    parser.add_argument("--copy-gb-s", type=float, help="of a copy on one device, reads and writes")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("options", nargs="*", help="of splash.serve")
    args = parser.parse_intermixed_args()
    _, config = read_options([*args.options, "prefix_cache=false"])
    busy = busy_cores()
    rows = measure(config, args.cases, args.copy_gb_s)
    settings = {"options": args.options, "others_busy_cores": busy, "copy_gb_s": args.copy_gb_s}
    report("hot_loop", {**settings, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
