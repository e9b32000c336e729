"""Distributions of lengths (tokens) and of pauses (seconds).

Bounds clip: what would lie above `high` is `high`, as a generation that meets its token limit is cut there.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from splash.core.errors import ConfigError
from splash.workload.draws import Floats, normal, uniform

MAX_TOKENS = 2**31 - 1


class Distribution(ABC):
    """A distribution of non-negative numbers that is drawn by address (see `splash.workload.draws`)."""

    kind: ClassVar[str]

    @abstractmethod
    def values(self, key: int, counters: npt.NDArray[Any]) -> Floats:
        """One number a counter."""

    @abstractmethod
    def mean(self) -> float:
        """Mean of `values`, clipping included."""

    def counts(self, key: int, counters: npt.NDArray[Any], least: int = 1) -> npt.NDArray[np.int64]:
        """`values` rounded to integers of at least `least`."""
        return np.clip(np.rint(self.values(key, counters)), least, MAX_TOKENS).astype(np.int64)


@dataclass(frozen=True)
class Constant(Distribution):
    """Always `value`."""

    kind: ClassVar[str] = "constant"
    value: float

    def __post_init__(self) -> None:
        _require("value", self.value, 0 <= self.value <= MAX_TOKENS, "at least 0")

    def values(self, key: int, counters: npt.NDArray[Any]) -> Floats:
        return np.full(len(counters), float(self.value))

    def mean(self) -> float:
        return self.value


@dataclass(frozen=True)
class Uniform(Distribution):
    """Anything from `low` to `high`, for counts both included, equally likely."""

    kind: ClassVar[str] = "uniform"
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def values(self, key: int, counters: npt.NDArray[Any]) -> Floats:
        return self.low + uniform(key, counters) * (self.high - self.low)

    def counts(self, key: int, counters: npt.NDArray[Any], least: int = 1) -> npt.NDArray[np.int64]:
        low, high = math.ceil(self.low), math.floor(self.high)  # rounding would make the two ends half as likely
        drawn = low + np.floor(uniform(key, counters) * max(1, high - low + 1))
        return np.clip(drawn, least, MAX_TOKENS).astype(np.int64)

    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Lognormal(Distribution):
    """exp of a normal whose standard deviation is `sigma`; `average` is its mean before clipping to the bounds."""

    kind: ClassVar[str] = "lognormal"
    average: float
    sigma: float
    low: float = 0.0
    high: float | None = None

    def __post_init__(self) -> None:
        _require("average", self.average, 0 < self.average <= MAX_TOKENS, "above 0")
        _require("sigma", self.sigma, 0 < self.sigma <= 10, "above 0 and at most 10")
        _check_bounds(self.low, _limit(self.high))

    @property
    def mu(self) -> float:
        """Mean of the logarithm."""
        return math.log(self.average) - self.sigma**2 / 2

    def values(self, key: int, counters: npt.NDArray[Any]) -> Floats:
        return np.clip(np.exp(self.mu + self.sigma * normal(key, counters)), self.low, _limit(self.high))

    def mean(self) -> float:
        return self._mean_below(_limit(self.high)) - self._mean_below(self.low) + self.low

    def _mean_below(self, cap: float) -> float:
        """Mean of the lesser of a draw and `cap`."""
        if cap <= 0:
            return 0.0
        cumulative = statistics.NormalDist().cdf
        z = (math.log(cap) - self.mu) / self.sigma
        return self.average * cumulative(z - self.sigma) + cap * (1 - cumulative(z))


@dataclass(frozen=True)
class Pareto(Distribution):
    """At least `low`; P(above x) = (low / x) ^ `alpha` until `high`. The smaller `alpha`, the heavier the tail."""

    kind: ClassVar[str] = "pareto"
    alpha: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _require("alpha", self.alpha, 0 < self.alpha <= 100, "above 0 and at most 100")
        _require("low", self.low, self.low > 0, "above 0")
        _check_bounds(self.low, self.high)

    def values(self, key: int, counters: npt.NDArray[Any]) -> Floats:
        return np.minimum(self.low * uniform(key, counters) ** (-1.0 / self.alpha), self.high)

    def mean(self) -> float:
        if self.alpha == 1:
            return self.low * (1 + math.log(self.high / self.low))
        tail = self.low * (self.high / self.low) ** (1 - self.alpha)
        return (self.alpha * self.low - tail) / (self.alpha - 1)


@dataclass(frozen=True)
class Empirical(Distribution):
    """One of `samples`, as likely as its weight says; without `weights` all alike."""

    kind: ClassVar[str] = "empirical"
    samples: tuple[float, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        ok = bool(self.samples) and all(0 <= sample <= MAX_TOKENS for sample in self.samples)
        _require("samples", self.samples, ok, "one or more numbers of at least 0")
        if self.weights is not None:
            ok = len(self.weights) == len(self.samples) and min(self.weights) >= 0 and 0 < sum(self.weights) < math.inf
            _require("weights", self.weights, ok, "one for every sample, none below 0 and not all 0")

    def values(self, key: int, counters: npt.NDArray[Any]) -> Floats:
        bounds = np.cumsum(self._shares())
        chosen = np.searchsorted(bounds, uniform(key, counters) * bounds[-1], side="right")
        return np.asarray(self.samples, np.float64)[chosen]

    def mean(self) -> float:
        return float(np.dot(self._shares(), self.samples))

    def _shares(self) -> Floats:
        weights = np.asarray(self.weights or np.ones(len(self.samples)), np.float64)
        return weights / weights.sum()


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    cls.kind: cls for cls in (Constant, Uniform, Lognormal, Pareto, Empirical)
}


def _limit(high: float | None) -> float:
    return MAX_TOKENS if high is None else high


def _check_bounds(low: float, high: float) -> None:
    _require("low", low, low >= 0, "at least 0")
    _require("high", high, low <= high <= MAX_TOKENS, f"between low ({low:g}) and {MAX_TOKENS}")


def _require(field: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise ConfigError(field, f"must be {accepted}, not {value!r}")
