"""Time the search for the end of a nucleus (`top_p`): a kernel beside torch's top and sort, which wait for the device.

    python -m perf.nucleus [--rows 1 16 128] [--spreads 0.5 2 6] [--top-p 0.9] [--out FILE]

`ms` is the device's time where nothing else runs, in turns. `host_ms` is how long the host is held up behind a kernel
of some `BUSY_MS`: what a step that is planned ahead loses. A small spread of logits makes a nucleus of much of the
vocabulary, for which torch sorts; logits of a large one end it within the likeliest few. The ceiling is one reading of
the scores at the rate of a copy, where 15 to 20 are made. Without a GPU, `--tiny` with TRITON_INTERPRET=1 shows that it
works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from perf.common import report
from perf.gpu import DEVICE, HAS_GPU, ceilings, in_turns, rounded, show
from splash.platform.cpu.kernels import CpuKernels
from splash.platform.kernels import Kernels
from splash.platform.triton.kernels import TritonKernels

VOCABULARY, TINY = 129_280, 500
BUSY_MS = 5
CLOCK_KHZ = 1_500_000  # about; how long exactly the device is busy does not matter


def held_up_ms(kernels: Kernels, scores: torch.Tensor, top_p: torch.Tensor) -> float:
    """Milliseconds until the call returns while the device is busy."""
    found = []
    for _ in range(5):
        if HAS_GPU:
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY_MS * CLOCK_KHZ)
        began = time.perf_counter()
        kernels.nucleus_floor(scores, top_p)
        found.append((time.perf_counter() - began) * 1e3)
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.nucleus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--spreads", type=float, nargs="+", default=[0.5, 2.0, 6.0], help="of logits")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a small vocabulary, for trying the benchmark itself")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    vocab = TINY if options.tiny else VOCABULARY
    ways: dict[str, Kernels] = {"torch": CpuKernels(), "kernel": TritonKernels(DEVICE)}
    found = []
    with torch.inference_mode():
        limits = ceilings()
        for rows in options.rows:
            top_p = torch.full((rows,), options.top_p, dtype=torch.float64, device=DEVICE)
            for spread in options.spreads:
                logits = torch.randn(rows, vocab, device=DEVICE) * spread
                scores = logits - logits.amax(-1, keepdim=True)
                floors = [kernels.nucleus_floor(scores, top_p) for kernels in ways.values()]
                mass, want = (
                    scores.double().exp().masked_fill(scores < floor.unsqueeze(1), 0).sum(-1) for floor in floors
                )
                if not torch.allclose(mass, want, rtol=1e-4):
                    raise SystemExit(f"wrong: nuclei of {rows} rows, spread {spread}, weigh {mass} and {want}")
                kept = float((scores >= floors[0].unsqueeze(1)).sum(-1).double().mean())
                calls = {name: partial(kernels.nucleus_floor, scores, top_p) for name, kernels in ways.items()}
                times = in_turns(calls, 10, options.rounds, graph=False)
                first = statistics.median(times["torch"])
                for name, values in times.items():
                    ms = statistics.median(values)
                    row: dict[str, Any] = {"by": name, "rows": rows, "spread": spread, "kept": kept, "ms": ms}
                    row["host_ms"] = held_up_ms(ways[name], scores, top_p)
                    row |= {"reading_ms": scores.nbytes / limits["copy_gb_s"] / 1e6, "of_torch": first / ms}
                    show(row)
                    found.append(rounded(row))
    report("nucleus", {"top_p": options.top_p, "ceilings": rounded(limits), "rows": found}, options.out)


if __name__ == "__main__":
    main()
