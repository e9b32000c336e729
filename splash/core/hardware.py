"""Hardware descriptions: what one rank's device can hold and how fast it is. Data, read from conf/hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass

from splash.core.errors import ConfigError

PLATFORMS = ("cpu", "cuda", "rocm")
GIB = 1 << 30


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
        memory_gb_s: memory bandwidth, 1e9 bytes/s.
        link_gb_s: bandwidth of one device to its peers in one direction, 1e9 bytes/s.

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

    def __post_init__(self) -> None:
        if self.platform not in PLATFORMS:
            raise ConfigError("hardware.platform", f"must be one of {', '.join(PLATFORMS)}, not {self.platform!r}")
        if self.ranks < 1:
            raise ConfigError("hardware.ranks", f"must be at least 1, not {self.ranks}")
        for field in ("memory_gib", "bf16_tflops", "memory_gb_s", "link_gb_s"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"hardware.{field}", f"must be above 0, not {value}")
        if self.fp8_tflops is not None and not self.fp8_tflops > 0:
            raise ConfigError("hardware.fp8_tflops", f"must be above 0, or null, not {self.fp8_tflops}")
        if not 0 <= self.reserve_gib < self.memory_gib:
            raise ConfigError(
                "hardware.reserve_gib", f"must be at least 0 and below memory_gib, not {self.reserve_gib}"
            )
