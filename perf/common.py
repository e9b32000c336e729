"""What every benchmark needs: where it ran, with which versions, percentiles, memory and the closing JSON line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import splash

PACKAGES = ("torch", "transformers", "numpy", "triton", "flashinfer-python")
PERCENTILES = (50, 95, 99)


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, operating system and GPUs as far as torch is loaded."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    total_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    info: dict[str, Any] = {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total_kib / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        info["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return info


def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that decide a figure."""
    found = {"splash": splash.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 2) -> dict[str, float]:
    """Percentiles and mean of `values` times `scale` (seconds to milliseconds), None where there are no values."""
    summary = {f"p{p}": round(percentile(values, p) * scale, digits) for p in PERCENTILES if values}
    if values:
        summary["mean"] = round(statistics.fmean(values) * scale, digits)
    return summary


def busy_cores(seconds: float = 1.0) -> float:
    """Cores busy over `seconds`, in which the caller does nothing: what other processes take."""

    def ticks() -> tuple[int, int]:
        numbers = [int(field) for field in _lines("/proc/stat")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # all, and idle or waiting for a disk

    total, idle = ticks()
    time.sleep(seconds)
    later_total, later_idle = ticks()
    share = 1 - (later_idle - idle) / max(1, later_total - total)
    return round(share * (os.cpu_count() or 1), 2)


def process_tree(pid: int) -> list[int]:
    """`pid` and its descendants that live now, parents first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it ended meanwhile
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    tree = [pid]
    for member in tree:  # grows while it is walked
        tree += [child for child, parent in parents.items() if parent == member]
    return tree


def pss_mib(pid: int) -> float:
    """Proportional set size in MiB: private memory plus a fair share of what is shared. 0 for a process that ended."""
    kib = [int(line.split()[1]) for line in _lines(f"/proc/{pid}/smaps_rollup") if line.startswith("Pss:")]
    return round(kib[0] / 1024, 1) if kib else 0.0


def report(benchmark: str, result: dict[str, Any], out: Path | None = None) -> None:
    """Print `result` as one JSON line, with machine, versions and date; write it to `out` as well."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {"benchmark": benchmark, "when": when, "machine": machine(), "versions": versions(), **result}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
