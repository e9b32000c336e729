"""Every kernel compiles for the targets that have no machine here, within shared memory and without costly spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"cuda:90": 232448, "cuda:100": 232448, "hip:gfx942": 65536, "hip:gfx950": 163840, "hip:gfx90a": 65536}
WHOLE = ("cuda:90", "cuda:100", "hip:gfx942")  # others compile attention only
# Registers that these save around their loops, and none inside; a block's accumulators leave few to spare.
MAY_SPILL = {"attend bf16": 400, "hopper attend bf16": 256, "expanded windows=True bf16": 16}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", SHARED)
def test_compiles_offline(target: str, tmp_path: Path) -> None:
    """In a process of its own: an interpreted function cannot be compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.triton.compile_kernels", target]
    command += [] if target in WHOLE else ["--only-attention"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(kernels) >= (20 if target in WHOLE else 4)
    assert not [k for k in kernels if k["shared"] > SHARED[target]]
    assert not [k for k in kernels if k.get("spilled", 0) > MAY_SPILL.get(k["name"], 0)]
    assert not [k for k in kernels if k.get("vgpr_spill_count", 0) + k.get("sgpr_spill_count", 0)]
    # ptxas gives up overlapping matrix products where it cannot follow their registers, and says so.
    assert not [k for k in kernels if k.get("serialized", 0)]
    if target == "cuda:90":
        assert {"hopper attend bf16", "hopper expanded deepseek bf16"} <= {k["name"] for k in kernels}
