"""Shared by every test: one thread a process, settled hypothesis runs, hardware markers and small checkpoints."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: ranks share few cores, and threads would fight

from collections.abc import Callable
from glob import glob
from pathlib import Path

if not glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/kfd"):
    # Without a GPU Triton's kernels are interpreted. Triton must know when it is first imported, by whomever.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import find_chromium

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Be ended as by a key press: fixtures then stop the servers and ranks that they have started.

    What `pytest.exit` raises would not do: hypothesis takes it for a failure of its example, and goes on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Under `pytest -n`: files go whole to whichever process is free, in order, so that small ones fill up the end.

    What runs on a GPU goes to one process, since tests there look at the memory that is left.
    """
    from xdist.scheduler import LoadScopeScheduling

    on_gpu = () if os.environ.get("TRITON_INTERPRET") == "1" else ("tests/gpu/", "tests/triton/")

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "on the GPU" if file.startswith(on_gpu) else file

    config.option.loadscopereorder = False
    return WholeFiles(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the soak."""
    group = parser.getgroup("soak")
    group.addoption("--soak-seconds", type=float, default=600.0, help="length of the soak under -m soak")
    group.addoption("--soak-summary", type=Path, help="write what the soak under -m soak found there, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a browser or hardware that is not here. torch is asked only when a test wants hardware.

    Slow tests come first, so that no process is left with them when the others have nothing more to do.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if find_chromium() is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="no Chromium on this machine"))
    wanted = {marker for marker in ("gpu", "rocm") for item in items if item.get_closest_marker(marker)}
    if not wanted:
        return
    import torch

    found = torch.cuda.is_available()
    usable = {"gpu": found and torch.version.hip is None, "rocm": found and torch.version.hip is not None}
    for item in items:
        for marker in wanted:
            if item.get_closest_marker(marker) and not usable[marker]:
                item.add_marker(pytest.mark.skip(reason=f"no {marker} device on this machine"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_checkpoint(name)` is the directory of a small random checkpoint, made once a session.

    Names are those of `tests.checkpoints.SHAPES`: base, no_q_lora, odd and wide.
    """
    from tests.checkpoints import make_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        path = root / name
        if not path.exists():
            make_checkpoint(name, path)
        return path

    return get
