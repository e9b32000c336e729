"""What this machine reaches: `python -m splash.calibrate [+hardware=auto] [ranks=T] [out=FILE]`.

Measures products, memory, attention, collectives and one-sided reads in a real group of ranks, then real steps of a
small model, and writes the figures that `splash.core.hardware.calibrated` puts in the place of a description's. Takes
about a minute. What is not measured is copied from the description, and the file names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from splash.core.errors import ConfigError, SplashError, WorkerError
from splash.core.hardware import Calibration, Collective, Costs, Hardware, calibration_path, save_calibration
from splash.core.layout import DP, TP, Layout
from splash.core.memory import ArenaGeometry
from splash.core.spec import DTYPE_BYTES, ModelSpec, kv_format
from splash.core.step import REPLAYED_ROWS
from splash.machine import describe
from splash.model.choice import ModelChoice
from splash.platform.base import Platform
from splash.platform.registry import detect, require
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad
from splash.scheduler.stages import Chunk
from splash.settings import build, compose, usage

MEASURED_PAGES = 512  # pages in the arenas that are measured, more than caches hold
BATCH = 16  # requests of the larger decode step
KEPT = (
    "indexer",
    "overlap",
    "expert_skew",
    "pull_slowdown",
    "trickle",
    "trickle_slowdown",
    "switch_us",
)


@dataclass(frozen=True)
class CalibrateSettings:
    """What to measure. conf/calibrate.yaml explains each."""

    ranks: int | None
    dtype: Literal["float32", "bfloat16"] | None
    model: ModelChoice
    load_format: Literal["safetensors", "dummy"]
    page_size: int
    budget_s: float
    timeout_s: float
    out: Path | None
    hardware: Hardware | None = None  # None: found by the machine

    def __post_init__(self) -> None:
        if self.model.path is None and self.load_format != "dummy":
            raise ConfigError(
                "model.path",
                f"{self.model.name} comes without weights; give a checkpoint's directory, or load_format=dummy",
            )
        for field, ok, accepted in (
            ("ranks", self.ranks is None or 1 <= self.ranks <= 128, "between 1 and 128"),
            ("page_size", self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0, "a power of two"),
            ("budget_s", self.budget_s > 0, "above 0"),
            ("timeout_s", self.timeout_s > 0, "above 0"),
        ):
            if not ok:
                raise ConfigError(field, f"must be {accepted}, not {getattr(self, field)!r}")


def calibrate(settings: CalibrateSettings, say: Callable[[str], None]) -> Calibration:
    """Measure everything. `say` is told what is being done, a line at a time.

    Raises:
        ConfigError: no description fits the device, or it is for a platform that is not the device's.
        PlatformUnavailable: the hardware is not usable here.
        WorkerError: a rank failed or did not finish in time; the message says which.
    """
    platform, hardware = choose(settings.hardware)
    device = platform.devices()[0].name
    ranks = settings.ranks or platform.default_ranks()
    dtype = settings.dtype or ("float32" if platform.name == "cpu" else "bfloat16")
    deadline = time.monotonic() + settings.timeout_s
    say(f"{device}: {ranks} ranks on platform {platform.name}, {dtype}, replacing the figures of {hardware.name}")
    say("measuring products, memory, attention, collectives and one-sided reads ...")
    measured = measure_ranks(settings, platform, ranks, dtype, deadline)
    without_steps = fit_stages(hardware, measured, settings.model.spec(), ranks, dtype)
    say(f"measuring steps of {settings.model.name} ...")
    times = measure_steps(settings, platform, ranks, dtype, deadline)
    costs = fit_steps(without_steps, times, settings, ranks, dtype)
    for line in _summary(costs):
        say(line)
    return Calibration(
        name=hardware.name,
        platform=platform.name,
        ranks=ranks,
        dtype=dtype,
        device=device,
        measured_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        bf16_tflops=costs.bf16_tflops if dtype == "bfloat16" else None,
        fp32_tflops=costs.fp32_tflops if dtype == "float32" else None,
        memory_gb_s=costs.memory_gb_s,
        link_gb_s=costs.link_gb_s,
        costs=_costs(costs),
        kept=KEPT,
    )


def choose(hardware: Hardware | None) -> tuple[Platform, Hardware]:
    """The platform to measure and the description whose figures are replaced, found by the device where not given."""
    if hardware is not None:
        return require(hardware.platform), hardware
    platform = detect()
    return platform, describe(platform)


def measure_ranks(
    settings: CalibrateSettings, platform: Platform, ranks: int, dtype: str, deadline: float
) -> dict[str, float]:
    """Run `splash.calibrate_rank` on every rank: each figure as the slowest rank measured it."""
    spec = settings.model.spec()
    kv, weight_bytes = kv_format(spec, dtype), DTYPE_BYTES[dtype]
    weights = ArenaGeometry(spec, kv, settings.page_size, weight_bytes, ranks, num_slots=1 << 40).num_weight_slots
    num_slots = weights + MEASURED_PAGES * (1 if platform.name == "cpu" else 16)
    geometry = ArenaGeometry(spec, kv, settings.page_size, weight_bytes, ranks, num_slots)
    handle = platform.create_group(ranks, 1, geometry)
    processes: list[subprocess.Popen[str]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="splash-calibrate-") as folder:
            for rank in range(ranks):
                job = {
                    "platform": platform.name,
                    "group": dict(handle.info),
                    "rank": rank,
                    "ranks": ranks,
                    "model_config": settings.model.contents(),
                    "dtype": dtype,
                    "page_size": settings.page_size,
                    "num_slots": num_slots,
                    "timeout_s": max(1.0, (deadline - time.monotonic()) * 0.8),
                    "budget_s": settings.budget_s,
                }
                # Files and not pipes, so that no rank waits to be read while another is.
                with open(f"{folder}/{rank}.out", "w") as out, open(f"{folder}/{rank}.err", "w") as errors:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "splash.calibrate_rank", json.dumps(job)],
                            pass_fds=handle.fds,
                            env={**os.environ, **platform.rank_environment(ranks)},
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=errors,
                            text=True,
                        )
                    )
            results = [_result(processes, rank, Path(folder), deadline) for rank in range(ranks)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        handle.close()
    # Times are the longest, rates the lowest.
    return {name: (max if name.endswith("_s") else min)(result[name] for result in results) for name in results[0]}


def _result(processes: Sequence[subprocess.Popen[str]], rank: int, folder: Path, deadline: float) -> dict[str, float]:
    try:
        code = processes[rank].wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise WorkerError(f"rank {rank} did not finish measuring in time; timeout_s can be raised", rank) from None
    if code:
        last = (folder / f"{rank}.err").read_text().strip().rpartition("\n")[2] or "no message"
        raise WorkerError(f"rank {rank} exited with {code} while measuring: {last}", rank)
    result: dict[str, float] = msgspec.json.decode((folder / f"{rank}.out").read_bytes(), type=dict[str, float])
    return result


def fit_stages(hardware: Hardware, measured: Mapping[str, float], spec: ModelSpec, ranks: int, dtype: str) -> Hardware:
    """The description with what ranks measured by themselves in place of its figures; overheads of steps are zero."""
    old = hardware.costs
    if old is None:
        raise ConfigError("hardware.costs", f"is missing in the description of {hardware.name}")
    peak = measured["gemm_peak"]
    bandwidth = max(measured["copy"], measured["read"], measured["movement"], measured["decode_read"])

    def collective(name: str) -> Collective:
        return Collective(measured[f"{name}_latency_s"] * 1e6, measured[f"{name}_rate"] / 1e9)

    costs = dataclasses.replace(
        old,
        all_reduce=collective("all_reduce"),
        all_gather=collective("all_gather"),
        reduce_scatter=collective("reduce_scatter"),
        all_to_all=collective("all_to_all"),
        gemm=_share(measured["gemm_typical"], peak),
        memory=_share(measured["read"], bandwidth),
        movement=_share(measured["movement"], bandwidth),
        absorbed=_share(measured["absorbed"], peak),
        decode=_share(measured["decode"], peak),
        expanded=1.0,
        decode_memory=_share(measured["decode_read"], bandwidth),
        expert_us=measured["expert_s"] * 1e6,
        pull_gb_s=measured["pull_rate"] / 1e9,
        page_pull_gb_s=measured["page_pull_rate"] / 1e9,
        pull_us=measured["pull_s"] * 1e6,
        op_us=0.0,
        step_us=0.0,
        request_us=0.0,
        attention_us=0.0,
    )
    fitted = dataclasses.replace(
        hardware,
        bf16_tflops=peak / 1e12 if dtype == "bfloat16" else hardware.bf16_tflops,
        fp32_tflops=peak / 1e12 if dtype == "float32" else hardware.fp32_tflops,
        memory_gb_s=bandwidth / 1e9,
        link_gb_s=measured["pull_rate"] / 1e9,
        costs=costs,
    )
    stages = CostModel(spec, fitted, ranks, dtype).stages
    heads, page_size = stages.spec.num_heads, stages.page_size
    # What the model does not explain of many sequences of one page is the sequences' own.
    tiny = measured["tiny_sequence_s"] - stages.attend_singles(page_size, page_size, 1, heads)
    # Expanded attention is its expansion, which is a product, and pairs, of which the rate is wanted.
    chunk = Chunk(0, int(measured["expanded_rows"]), int(measured["expanded_start"]))
    at_peak = stages.attend_expanded(chunk, heads)
    pairs_s = stages.expanded_pairs(chunk, heads)
    left = max(measured["expanded_s"] - (at_peak - pairs_s), pairs_s)
    return dataclasses.replace(
        fitted,
        costs=dataclasses.replace(costs, attention_us=max(0.0, tiny) * 1e6, expanded=_share(pairs_s, left)),
    )


def measure_steps(
    settings: CalibrateSettings, platform: Platform, ranks: int, dtype: str, deadline: float
) -> dict[str, float]:
    """Seconds of real steps: of nothing, of one request that decodes, of `BATCH` of them, and of a prompt."""
    from splash.calibrate_steps import StepBench

    timeout_s = max(1.0, deadline - time.monotonic())
    with StepBench(
        settings.model, settings.load_format, platform, ranks, dtype, settings.page_size, 4 * BATCH, timeout_s
    ) as bench:
        layout = _layout(bench.layouts())
        return {
            "empty": bench.measure(layout, StepLoad.of_arrays([], [], [], ranks), 30),
            "one": bench.measure(layout, StepLoad.decode(1, settings.page_size, ranks), 30),
            "many": bench.measure(layout, StepLoad.decode(BATCH, settings.page_size, ranks), 20),
            "short": bench.measure(layout, _unrecorded(ranks), 5),
        }


def fit_steps(
    hardware: Hardware, times: Mapping[str, float], settings: CalibrateSettings, ranks: int, dtype: str
) -> Hardware:
    """The overheads of steps: what the stages do not explain, shared out by operations and by requests.

    Where steps are replayed as graphs, the shortest prompt that is not takes as long as the host does to start it.
    """
    assert hardware.costs is not None
    spec = settings.model.spec()
    costs = dataclasses.replace(hardware.costs, step_us=times["empty"] * 1e6)
    model = CostModel(spec, dataclasses.replace(hardware, costs=costs), ranks, dtype, settings.page_size)
    layout = _layout(model.layouts)
    one, many = StepLoad.decode(1, settings.page_size, ranks), StepLoad.decode(BATCH, settings.page_size, ranks)
    rest_of_one = max(0.0, times["one"] - model.step(layout, one).seconds)
    per_operation = rest_of_one / model.operations(layout, one)
    rest_of_many = times["many"] - model.step(layout, many).seconds - rest_of_one
    per_request = max(0.0, rest_of_many) / BATCH
    launched = (times["short"] - times["empty"]) / model.operations(layout, _unrecorded(ranks))
    return dataclasses.replace(
        hardware,
        costs=dataclasses.replace(
            costs,
            op_us=per_operation * 1e6,
            launch_us=max(0.0, launched) * 1e6 if costs.launch_us else 0.0,
            request_us=per_request * 1e6,
        ),
    )


def _unrecorded(ranks: int) -> StepLoad:
    """The least step that is never recorded."""
    return StepLoad.prefill(1, REPLAYED_ROWS + 1, 0, ranks)


def _layout(usable: Sequence[Layout]) -> Layout:
    """Steps are measured in the layout with the fewest collectives of its own."""
    return TP if TP in usable else DP


def _costs(hardware: Hardware) -> Costs:
    assert hardware.costs is not None
    return hardware.costs


def _share(part: float, whole: float) -> float:
    return min(1.0, max(1e-3, part / whole))


def _summary(hardware: Hardware) -> list[str]:
    costs = _costs(hardware)
    rate = hardware.fp32_tflops if hardware.platform == "cpu" else hardware.bf16_tflops
    reached = ", ".join(
        f"{name} {getattr(costs, name):.0%}"
        for name in ("gemm", "absorbed", "expanded", "memory", "movement", "decode", "decode_memory")
    )
    collectives = ", ".join(
        f"{name} {getattr(costs, name).latency_us:.0f} us + {getattr(costs, name).gb_s:.1f} GB/s"
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    )
    return [
        f"  peak {rate or 0:.3g} TFLOP/s, memory {hardware.memory_gb_s:.3g} GB/s; reached: {reached}",
        f"  {collectives}",
        f"  pulls {costs.pull_gb_s:.1f} GB/s, of pages {costs.page_pull_gb_s:.1f} GB/s",
        f"  {costs.op_us:.1f} us an operation, {costs.step_us:.0f} us a step, {costs.request_us:.0f} us a request, "
        f"{costs.attention_us:.0f} us a sequence and layer, {costs.expert_us:.0f} us an expert and layer",
    ]


def read_settings(arguments: Sequence[str]) -> CalibrateSettings:
    """Settings of a command line. `hardware=auto` is the same as leaving it out.

    Raises:
        ConfigError: naming the option at fault.
    """
    given = [argument for argument in arguments if argument.lstrip("+") != "hardware=auto"]
    return build(CalibrateSettings, compose("calibrate", given))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, 1 where a rank failed, 2 where an option or hardware cannot be used."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(argument in ("-h", "--help") for argument in arguments):
        print(usage("python -m splash.calibrate", "calibrate"))
        return 0
    try:
        settings = read_settings(arguments)
        calibration = calibrate(settings, lambda line: print(line, flush=True))
        out = settings.out or calibration_path(calibration.platform)
        save_calibration(out, calibration)
    except SplashError as error:
        print(f"splash.calibrate: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    except OSError as error:
        print(f"splash.calibrate: out: cannot be written: {error}", file=sys.stderr)
        return 2
    print(f"written to {out}; hardware.calibration={out} uses it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
