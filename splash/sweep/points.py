"""Which points a sweep has: grids from conf/sweep, options from the command line, and every combination of both."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import splash
from splash.core.errors import ConfigError
from splash.core.hardware import Hardware, calibrated
from splash.core.layout import parse_layout
from splash.core.spec import DTYPE_BYTES, ModelSpec
from splash.plan import MAX_RANKS, ModelChoice
from splash.scheduler.policy import PolicyConfig
from splash.settings import Composer, alternatives, build, compose, options, pick
from splash.workload import Workload, from_mapping

MAX_POINTS = 100_000


@dataclass(frozen=True)
class Grid:
    """One grid of a sweep: every combination of the values that its options have.

    Attributes:
        name: what the report calls it. Grids of one name are shown together.
        vary: overrides in Hydra's syntax, of one value or several; the first varies slowest.
        hardware: names of the devices that it is for; none stands for all.
    """

    name: str
    vary: tuple[str, ...]
    hardware: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """A file of conf/sweep.

    Attributes:
        name: the sweep's, which names the folder as well.
        title: heading of the report.
        about: what it is for, a few sentences.
        grids: the grids.
        common: overrides of all grids.
    """

    name: str
    title: str
    about: str
    grids: tuple[Grid, ...]
    common: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ConfigError("sweep.name", f"must be letters, digits, dots and dashes, not {self.name!r}")
        if not self.grids:
            raise ConfigError("sweep.grids", "must name at least one grid")


@dataclass(frozen=True)
class RunSettings:
    """How a sweep is run. conf/sweep.yaml explains each."""

    sweep: Sweep
    out: Path | None
    workers: int
    fresh: bool
    format: Literal["table", "json"]

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 1024:
            raise ConfigError("workers", f"must be between 1 and 1024, not {self.workers}")

    @property
    def folder(self) -> Path:
        """Where rows, CSV and report go."""
        return self.out if self.out is not None else Path("sweeps") / self.sweep.name


@dataclass(frozen=True)
class PointSettings:
    """One point. conf/sweep.yaml explains each."""

    model: ModelChoice
    hardware: Hardware
    workload: Mapping[str, Any]
    layout: str
    policy: PolicyConfig
    ranks: int | None
    dtype: str
    kv_dtype: str | None
    page_size: int
    prefix_cache: bool
    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int | None
    mem_fraction: float
    kv_cache_gib: float | None
    serving: Literal["colocated", "disaggregated"]
    decode_ranks: int
    timeline: bool
    cheapest_forms: bool
    run: Literal["auto", "measure", "simulate"]

    def __post_init__(self) -> None:
        parse_layout(self.layout)
        for field, ok, accepted in (
            ("dtype", self.dtype in DTYPE_BYTES, f"one of {', '.join(DTYPE_BYTES)}"),
            ("kv_dtype", self.kv_dtype is None or self.kv_dtype in DTYPE_BYTES, f"one of {', '.join(DTYPE_BYTES)}"),
            ("ranks", self.ranks is None or 1 <= self.ranks <= MAX_RANKS, f"between 1 and {MAX_RANKS}"),
            ("decode_ranks", 1 <= self.decode_ranks <= MAX_RANKS, f"between 1 and {MAX_RANKS}"),
            ("page_size", self.page_size >= 1 and self.page_size & (self.page_size - 1) == 0, "a power of two"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            ("max_batched_tokens", self.max_batched_tokens >= 1, "at least 1"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            ("mem_fraction", 0 < self.mem_fraction <= 1, "above 0 and at most 1"),
            ("kv_cache_gib", self.kv_cache_gib is None or self.kv_cache_gib > 0, "above 0"),
        ):
            if not ok:
                raise ConfigError(field, f"must be {accepted}, not {getattr(self, field)!r}")


@dataclass(frozen=True)
class Point:
    """A point with what its settings stand for.

    Attributes:
        grid: the name of its grid.
        settings: what was composed.
        hardware: with the figures of a calibration where there is one.
        spec: the model's dimensions.
        workload: the requests.
    """

    grid: str
    settings: PointSettings
    hardware: Hardware
    spec: ModelSpec
    workload: Workload

    @property
    def ranks(self) -> int:
        """T."""
        return self.settings.ranks or self.hardware.ranks

    @cached_property
    def digest(self) -> str:
        """Names everything that decides what the point gives: its settings, hardware figures and SPLASH's version."""
        settings = dataclasses.asdict(self.settings) | {"hardware": dataclasses.asdict(self.hardware)}
        for chosen in ("run", "ranks"):  # asked for is not what was done: null and a number may be the same
            del settings[chosen]
        named = {"settings": settings, "ranks": self.ranks, "version": splash.__version__}
        text = json.dumps(named, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def label(self) -> str:
        """A few words for people."""
        settings = self.settings
        how = settings.layout if settings.policy.kind == "static" else settings.policy.kind
        return f"{self.hardware.name} {settings.model.name} {how} {settings.workload.get('kind')}"


def read_sweep(arguments: Sequence[str]) -> tuple[RunSettings, list[Point]]:
    """The run and its points, in order, of a command line of overrides.

    `--multirun` (`-m`) is accepted and changes nothing: an option with several values always stands for several points.

    Raises:
        ConfigError: an option is unknown, has a value that cannot work, or no point is left.
        CheckpointError: a model cannot be read.
    """
    arguments = [argument for argument in arguments if argument not in ("--multirun", "-m")]
    for argument in arguments:
        if argument.startswith("-"):
            raise ConfigError(argument, "options are written option=value; --help lists them")
    fixed = {field.name for field in dataclasses.fields(RunSettings)}
    chosen: dict[str, list[str]] = {}
    for argument in arguments:
        key, each = alternatives(argument)
        chosen[key] = each
    run_overrides = [item for key, each in chosen.items() if _root(key) in fixed for item in each]
    for key, each in chosen.items():
        if _root(key) in fixed and len(each) > 1:
            raise ConfigError(key, f"takes one value, not {len(each)}")
    run = build(RunSettings, pick(RunSettings, compose("sweep", run_overrides)))
    vary = {key: each for key, each in chosen.items() if _root(key) not in fixed}
    return run, _points(run.sweep, vary)


def _points(sweep: Sweep, chosen: dict[str, list[str]]) -> list[Point]:
    composer = Composer("sweep")
    wanted = None if "hardware" not in chosen else [item.partition("=")[2] for item in chosen["hardware"]]
    points: list[Point] = []
    for grid in _of_hardware(sweep, wanted):
        names = grid.hardware if wanted is None else [name for name in wanted if name in (grid.hardware or wanted)]
        vary = {"hardware": [f"+hardware={name}" for name in names]} if names else {}
        # What is said later takes the place of what was said before, where it stands.
        vary |= {key: each for item in (*sweep.common, *grid.vary) for key, each in [alternatives(item)]}
        vary |= {key: each for key, each in chosen.items() if key != "hardware"}
        count = 1
        for each in vary.values():
            count *= len(each)
        if len(points) + count > MAX_POINTS:
            raise ConfigError("sweep", f"has more than {MAX_POINTS:,} points")
        points += [_point(composer.compose(item), grid.name) for item in itertools.product(*vary.values())]
    return points


def _of_hardware(sweep: Sweep, wanted: Sequence[str] | None) -> list[Grid]:
    """The grids that are for any of the hardware wanted."""
    known = options("hardware")
    for name in wanted or ():
        if name not in known:
            raise ConfigError("hardware", f"unknown hardware {name!r}; choose one of {', '.join(known)}")
        if not any(not grid.hardware or name in grid.hardware for grid in sweep.grids):
            having = sorted({name for grid in sweep.grids for name in grid.hardware})
            raise ConfigError("hardware", f"sweep={sweep.name} has no grid for {name}, only for {', '.join(having)}")
    if wanted is None:
        return list(sweep.grids)
    return [grid for grid in sweep.grids if not grid.hardware or set(wanted) & set(grid.hardware)]


def _point(composed: Mapping[str, Any], grid: str) -> Point:
    if "hardware" not in composed:
        raise ConfigError("hardware", f"choose with +hardware=NAME; any of {', '.join(options('hardware'))}")
    settings = build(PointSettings, pick(PointSettings, composed))
    return Point(
        grid=grid,
        settings=settings,
        hardware=calibrated(settings.hardware),
        spec=_spec(settings.model.name, settings.model.path, json.dumps(settings.model.config)),
        workload=from_mapping(settings.workload),
    )


@lru_cache(maxsize=64)
def _spec(name: str, path: str | None, config: str) -> ModelSpec:
    return ModelChoice(name, path, json.loads(config)).spec()


def _root(key: str) -> str:
    return key.partition(".")[0]
