"""What works here: `python -m splash.doctor [--json]`.

Says for each platform whether it can serve and why not, and which devices and packages there are. A platform that can
serve has to prove it with a group of two real rank processes. Exits with 0 if at least one platform passes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform as host
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import splash
from splash.core.errors import SplashError
from splash.core.memory import ArenaGeometry
from splash.core.spec import ModelSpec, RopeSpec, kv_format
from splash.platform.base import DeviceInfo
from splash.platform.registry import PLATFORMS, get_platform

PACKAGES = ("torch", "triton", "flashinfer-python", "amd-aiter", "nvidia-ml-py", "pyrsmi")
SELF_TEST_RANKS = 2
SELF_TEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PlatformReport:
    """One platform: whether it passes, why (not), what to do about it, and the devices found."""

    name: str
    ok: bool
    reason: str
    remedy: str
    devices: list[DeviceInfo]


@dataclass(frozen=True)
class Report:
    """Everything the doctor found. `packages` maps a distribution to its version, or None where it is absent."""

    versions: dict[str, str]
    packages: dict[str, str | None]
    platforms: list[PlatformReport]

    @property
    def ok(self) -> bool:
        """Whether at least one platform passes."""
        return any(platform.ok for platform in self.platforms)


def examine(timeout_s: float = SELF_TEST_TIMEOUT_S) -> Report:
    """Look at every platform and package. A platform that claims to be usable here also has to pass its self-test."""
    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    versions = {"splash": splash.__version__, "python": host.python_version(), "system": host.platform()}
    return Report(versions, packages, [_examine_platform(name, timeout_s) for name in PLATFORMS])


def _examine_platform(name: str, timeout_s: float) -> PlatformReport:
    platform = get_platform(name)
    availability = platform.availability()
    ok, reason, remedy = availability.ok, availability.reason, availability.remedy
    if ok:
        try:
            reason = f"{reason}; {self_test(name, timeout_s)}"
        except (SplashError, OSError) as error:
            ok, reason, remedy = False, f"self-test failed: {error}", "report it with this output"
    return PlatformReport(name, ok, reason, remedy, platform.devices())


def self_test(name: str, timeout_s: float = SELF_TEST_TIMEOUT_S) -> str:
    """Start two rank processes that read each other's arena and sum over the group.

    Returns:
        What was done.

    Raises:
        SplashError: it did not work; the message names the rank.
    """
    platform = get_platform(name)
    spec = ModelSpec("self-test", 1, 8, 8, 2, None, 8, 4, 2, 4, 8, 1, 64, 1e-6, RopeSpec())
    geometry = ArenaGeometry(spec, kv_format(spec, "float32"), 16, 4, SELF_TEST_RANKS, num_slots=64)
    started = time.monotonic()
    handle = platform.create_group(SELF_TEST_RANKS, 1, geometry)
    group = json.dumps(dict(handle.info))
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(SELF_TEST_RANKS):
            arguments = ["--self-test", name, "--rank", str(rank), "--group", group, "--timeout", str(timeout_s / 2)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "splash.doctor", *arguments],
                    pass_fds=handle.fds,
                    env={**os.environ, **platform.rank_environment(SELF_TEST_RANKS)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for rank, process in enumerate(processes):
            try:
                _, errors = process.communicate(timeout=max(0.0, started + timeout_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise SplashError(f"rank {rank} did not finish within {timeout_s:g} s") from None
            if process.returncode:
                last = errors.strip().rpartition("\n")[2] or "no message"
                raise SplashError(f"rank {rank} exited with {process.returncode}: {last}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        handle.close()
    return f"{SELF_TEST_RANKS} ranks exchanged data in {time.monotonic() - started:.1f} s"


def _self_test_rank(name: str, rank: int, group: str, timeout_s: float) -> None:
    """One rank of the self-test."""
    import torch

    member = get_platform(name).join(json.loads(group), rank, timeout_s)
    member.arenas.local(0).fill_(rank + 1)
    member.comm.barrier()
    for peer in range(member.size):
        if not bool((member.arenas.peer(peer, 0) == peer + 1).all()):
            raise SplashError(f"rank {rank} cannot read the arena of rank {peer}")
    total = member.comm.all_reduce(torch.full((1000,), float(rank + 1), device=member.device))
    if not bool((total == member.size * (member.size + 1) / 2).all()):
        raise SplashError(f"all_reduce is wrong on rank {rank}")
    member.comm.close()


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(", ".join(f"{name} {version}" for name, version in report.versions.items()), highlight=False)
    platforms = Table("platform", "", title="Platforms", title_justify="left")
    for heading in ("why", "what to do"):
        platforms.add_column(heading, overflow="fold")  # an address must not be cut
    for platform in report.platforms:
        verdict = "[green]PASS[/]" if platform.ok else "[red]FAIL[/]"
        platforms.add_row(platform.name, verdict, platform.reason, platform.remedy)
    console.print(platforms)
    columns = ("platform", "device", "name", "memory", "free", "state")
    devices = Table(*columns, title="Devices", title_justify="left")
    for platform in report.platforms:
        for device in platform.devices:
            total, free = (f"{num_bytes / 2**30:.1f} GiB" for num_bytes in (device.total_bytes, device.free_bytes))
            devices.add_row(platform.name, str(device.index), device.name, total, free, device.state)
    console.print(devices)
    packages = Table("package", "version", title="Packages", title_justify="left")
    for package, version in report.packages.items():
        packages.add_row(package, version or "[dim]absent[/]")
    console.print(packages)


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m splash.doctor", description="Say what works on this machine.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--timeout", type=float, default=SELF_TEST_TIMEOUT_S, help="seconds that a self-test may take")
    for hidden in ("--self-test", "--rank", "--group"):  # how a self-test starts its ranks
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.self_test:
        _self_test_rank(options.self_test, int(options.rank), options.group, options.timeout)
        return 0
    report = examine(options.timeout)
    if options.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        _print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
