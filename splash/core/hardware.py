"""Hardware descriptions: what one rank's device can hold and how fast it is. Data, read from conf/hardware.

A description has peak figures and `Costs`, what is reached of them in practice. `python -m splash.calibrate` measures
both on the machine at hand and writes them to a file, a `Calibration`, whose figures take the description's place.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splash.core.errors import ConfigError

PLATFORMS = ("cpu", "cuda", "rocm")
GIB = 1 << 30
SHARES = ("gemm", "memory", "movement", "absorbed", "expanded", "decode", "decode_memory", "indexer", "trickle")


@dataclass(frozen=True)
class Collective:
    """What one collective costs: `latency_us` plus, for the bytes that a rank receives, bytes over `gb_s`.

    Attributes:
        latency_us: of a collective with next to no data, microseconds.
        gb_s: bytes that a rank receives from its peers a second, 1e9 bytes/s.
    """

    latency_us: float
    gb_s: float


@dataclass(frozen=True)
class Costs:
    """What a step reaches of the peak figures, and what it pays besides. `splash.scheduler.cost_model` uses each.

    Attributes:
        gemm: share of the peak rate that a large matrix product reaches.
        memory: share of the memory bandwidth at which products read weights and activations.
        movement: the same of operations that rearrange activations into memory that they allocate.
        absorbed: share of the peak rate of absorbed attention of a chunk's rows.
        expanded: share of the peak rate of expanded attention.
        decode: share of the peak rate of absorbed attention of single rows, where it is bound by arithmetic.
        decode_memory: share of the memory bandwidth at which attention reads the cache, where it is bound by that.
        indexer: share of the peak rate of a sparse-attention indexer's scores.
        all_reduce, all_gather, reduce_scatter, all_to_all: collectives within a step.
        overlap: most of the attention time that communication can hide behind, a share.
        expert_skew: rows of the experts of the busiest rank, over what uniform routing would give it.
        op_us: time that an operation takes on the device however little it computes, microseconds.
        launch_us: time to start an operation from the host where no graph does, microseconds; 0 where op_us has it.
        step_us: time a step outside the layers: planning, sending, sampling, microseconds.
        request_us: the same a request, microseconds.
        attention_us: time that attention takes a layer and sequence besides its arithmetic and reads, microseconds.
        expert_us: time a layer and expert with any row besides its arithmetic and reads, microseconds.
        pull_gb_s: one-sided reads of long extents from peers, 1e9 bytes/s.
        page_pull_gb_s: one-sided reads of scattered pages from peers, 1e9 bytes/s.
        pull_us: time to begin and agree on the reads of one layer, microseconds.
        pull_slowdown: time of compute beside reads at full rate, over its time alone.
        trickle: share of `pull_gb_s` that copying ahead of a switch takes.
        trickle_slowdown: time of steps beside a trickle, over their time alone.
        switch_us: time that every switch takes: planning, agreeing, committing, microseconds.

    Raises:
        ConfigError: naming the number that is out of range.
    """

    gemm: float
    memory: float
    movement: float
    absorbed: float
    expanded: float
    decode: float
    decode_memory: float
    indexer: float
    all_reduce: Collective
    all_gather: Collective
    reduce_scatter: Collective
    all_to_all: Collective
    overlap: float
    expert_skew: float
    op_us: float
    launch_us: float
    step_us: float
    request_us: float
    attention_us: float
    expert_us: float
    pull_gb_s: float
    page_pull_gb_s: float
    pull_us: float
    pull_slowdown: float
    trickle: float
    trickle_slowdown: float
    switch_us: float

    def __post_init__(self) -> None:
        for field in SHARES:
            _check(f"costs.{field}", 0 < getattr(self, field) <= 1, "above 0 and at most 1", getattr(self, field))
        _check("costs.overlap", 0 <= self.overlap <= 1, "between 0 and 1", self.overlap)
        for field in ("expert_skew", "pull_slowdown", "trickle_slowdown"):
            value = getattr(self, field)
            _check(f"costs.{field}", 1 <= value < math.inf, "at least 1", value)
        for field in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            collective = getattr(self, field)
            latency, rate = collective.latency_us, collective.gb_s
            _check(f"costs.{field}.latency_us", 0 <= latency < math.inf, "at least 0", latency)
            _check(f"costs.{field}.gb_s", 0 < rate < math.inf, "above 0", rate)
        for field in ("pull_gb_s", "page_pull_gb_s"):
            _check(f"costs.{field}", 0 < getattr(self, field) < math.inf, "above 0", getattr(self, field))
        for field in (field.name for field in dataclasses.fields(self) if field.name.endswith("_us")):
            _check(f"costs.{field}", 0 <= getattr(self, field) < math.inf, "at least 0", getattr(self, field))


@dataclass(frozen=True)
class Hardware:
    """One kind of device, as its datasheet or a measurement describes it. The YAML says which, number by number.

    Attributes:
        name: what people call it.
        platform: "cpu", "cuda" or "rocm".
        ranks: devices of a usual host, the default T.
        memory_gib: memory of one device that programs can allocate, GiB.
        reserve_gib: of that, what graphs, workspaces and activations take, GiB.
        bf16_tflops: peak dense bfloat16 rate, TFLOP/s.
        fp8_tflops: peak dense FP8 rate, TFLOP/s; None where the device has no FP8 arithmetic.
        fp32_tflops: peak dense float32 rate, TFLOP/s; None where unknown.
        memory_gb_s: memory bandwidth, 1e9 bytes/s.
        link_gb_s: bandwidth of one device to its peers in one direction, 1e9 bytes/s.
        costs: what is reached of the peaks; None in a description that is only planned with.
        calibration: file of `python -m splash.calibrate` whose figures take the place of these; see `calibrated`.

    Raises:
        ConfigError: naming the number that is out of range.
    """

    name: str
    platform: str
    ranks: int
    memory_gib: float
    reserve_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    memory_gb_s: float
    link_gb_s: float
    fp32_tflops: float | None = None
    costs: Costs | None = None
    calibration: str | None = None

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise ConfigError("hardware.platform", f"must be one of {', '.join(PLATFORMS)}, not {self.platform!r}")
        if self.ranks < 1:
            raise ConfigError("hardware.ranks", f"must be at least 1, not {self.ranks}")
        for field in ("memory_gib", "bf16_tflops", "memory_gb_s", "link_gb_s"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"hardware.{field}", f"must be above 0, not {value}")
        for field in ("fp8_tflops", "fp32_tflops"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(f"hardware.{field}", f"must be above 0, or null, not {value}")
        if not 0 <= self.reserve_gib < self.memory_gib:
            raise ConfigError(
                "hardware.reserve_gib", f"must be at least 0 and below memory_gib, not {self.reserve_gib}"
            )

    def tflops(self, dtype: str) -> float:
        """Peak dense rate in `dtype` ("float32", "bfloat16" or "fp8"), TFLOP/s.

        FP8 weights on a device without FP8 arithmetic are multiplied in bfloat16.

        Raises:
            ConfigError: the device's float32 rate is unknown.
        """
        if dtype == "float32":
            if self.fp32_tflops is None:
                raise ConfigError("hardware.fp32_tflops", f"is not known for {self.name}, and dtype is float32")
            return self.fp32_tflops
        return self.fp8_tflops or self.bf16_tflops if dtype == "fp8" else self.bf16_tflops


@dataclass(frozen=True)
class Calibration:
    """Figures that were measured on a machine, to take the place of a description's.

    Attributes:
        name, platform: of the description that the figures replace.
        ranks: ranks of the group that was measured. Latencies of collectives depend on it.
        dtype: of the products and the attention that were measured.
        device: what the device calls itself.
        measured_at: when, ISO 8601 in UTC.
        bf16_tflops, fp32_tflops, memory_gb_s, link_gb_s, costs: as in `Hardware`; a rate that was not measured is None
            and leaves the description's.
        kept: names of figures that were not measured but copied from the description.
    """

    name: str
    platform: str
    ranks: int
    dtype: str
    device: str
    measured_at: str
    bf16_tflops: float | None
    fp32_tflops: float | None
    memory_gb_s: float
    link_gb_s: float
    costs: Costs
    kept: tuple[str, ...] = ()


def calibration_path(platform: str) -> Path:
    """Where `python -m splash.calibrate` leaves its file by default: ~/.cache/splash, or $XDG_CACHE_HOME/splash."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "splash" / f"calibration-{platform}.json"


def load_calibration(path: str | Path) -> Calibration:
    """Read a file that `python -m splash.calibrate` wrote.

    Raises:
        ConfigError: there is no such file, or it is no calibration.
    """
    try:
        text = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError("hardware.calibration", f"{path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(text, type=Calibration)
    except msgspec.DecodeError as error:  # malformed, of wrong types, or refused by Costs
        raise ConfigError(
            "hardware.calibration", f"{path} is no calibration: {error} (python -m splash.calibrate writes it anew)"
        ) from None


def save_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write a calibration as JSON, which is YAML too, making its folder. An old file is replaced at once."""
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
    beside.replace(path)


def calibrated(hardware: Hardware) -> Hardware:
    """`hardware` with the figures of its calibration.

    That is the file that `hardware.calibration` names, else the one in the default place where it is for hardware of
    this name, else none.

    Raises:
        ConfigError: the file cannot be used, or is for another platform.
    """
    if hardware.calibration is not None:
        found = load_calibration(hardware.calibration)
        if found.platform != hardware.platform:
            raise ConfigError(
                "hardware.calibration",
                f"{hardware.calibration} is for platform {found.platform}, and {hardware.name} is {hardware.platform}",
            )
    else:
        path = calibration_path(hardware.platform)
        if not path.is_file():
            return hardware
        found = load_calibration(path)
        if (found.name, found.platform) != (hardware.name, hardware.platform):
            return hardware
    return with_figures(hardware, found)


def with_figures(hardware: Hardware, found: Calibration) -> Hardware:
    """`hardware` with what a calibration measured in the place of its figures."""
    return dataclasses.replace(
        hardware,
        bf16_tflops=hardware.bf16_tflops if found.bf16_tflops is None else found.bf16_tflops,
        fp32_tflops=hardware.fp32_tflops if found.fp32_tflops is None else found.fp32_tflops,
        memory_gb_s=found.memory_gb_s,
        link_gb_s=found.link_gb_s,
        costs=found.costs,
    )


def _check(field: str, ok: bool, accepted: str, value: float) -> None:
    if not ok:
        raise ConfigError(f"hardware.{field}", f"must be {accepted}, not {value}")
