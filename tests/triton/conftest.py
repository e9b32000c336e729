"""Kernels run on the GPU where there is one, and under Triton's interpreter elsewhere (see tests/conftest.py)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def device() -> torch.device:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, and TRITON_INTERPRET is not 1")
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
