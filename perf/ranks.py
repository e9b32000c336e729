"""A fresh group of ranks for a benchmark: processes of the benchmark's own module, started once more with `--rank`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from splash.platform.base import GroupHandle, Platform


def rank_zero(
    benchmark: str, options: Sequence[str], platform: Platform, handle: GroupHandle, ranks: int, timeout_s: float
) -> str:
    """What rank 0 printed. Closes the handle and leaves no process behind, whatever happens.

    Args:
        benchmark: `python -m perf.BENCHMARK [options] --rank R --group JSON` is a rank, which joins by that info.
        timeout_s: for each rank's end.

    Raises:
        SystemExit: a rank failed.
    """
    group = json.dumps(dict(handle.info))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"perf.{benchmark}", *options, "--rank", str(rank), "--group", group],
            pass_fds=handle.fds,
            env={**os.environ, **platform.rank_environment(ranks)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        handle.close()
    if any(process.returncode for process in processes):
        raise SystemExit(f"ranks ended with {[process.returncode for process in processes]}")
    return outputs[0]
