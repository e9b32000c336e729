"""Workloads from configuration: `conf/workload/NAME.yaml`, or any mapping with a `kind`."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any

from splash.core.errors import ConfigError
from splash.settings import build, compose, options
from splash.workload.distributions import DISTRIBUTIONS, Constant, Distribution
from splash.workload.kinds import Agentic, Bursts, Fixed, Poisson, RlRollout, Workload
from splash.workload.phases import Phases
from splash.workload.trace import Trace

KINDS: dict[str, type[Workload]] = {
    cls.kind: cls for cls in (Fixed, Poisson, Bursts, RlRollout, Agentic, Trace, Phases)
}


def load(name: str, overrides: Sequence[str] = ()) -> Workload:
    """The workload that `conf/workload/<name>.yaml` describes, with overrides such as "workload.rate=4".

    Raises:
        ConfigError: there is no such file, or an override is not understood.
    """
    if name not in options("workload"):
        raise ConfigError("workload", f"unknown workload {name!r}; choose one of {', '.join(options('workload'))}")
    return from_mapping(compose(f"workload/{name}", overrides)["workload"])


def from_mapping(mapping: Mapping[str, Any], prefix: str = "workload.") -> Workload:
    """Build the workload whose `kind` is in `mapping`; the other keys are its fields.

    A distribution is a mapping with a `kind` as well, or a number, which is always that; each of the workloads of
    `phases` is such a mapping too.

    Raises:
        ConfigError: a field is absent, unknown, or refused. `prefix` goes before its name.
    """
    cls, values = _select(KINDS, mapping, prefix)
    hints = typing.get_type_hints(cls)
    for name in values.keys() & hints.keys():
        if hints[name] is Distribution:
            values[name] = _distribution(values[name], f"{prefix}{name}")
        elif hints[name] == Mapping[str, Workload]:
            values[name] = _workloads(values[name], f"{prefix}{name}")
    return _build(cls, values, prefix)


def _workloads(value: object, field: str) -> dict[str, Workload]:
    if not isinstance(value, Mapping):
        raise ConfigError(field, f"must be a mapping of names to workloads, not {value!r}")
    for name, mapping in value.items():
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{field}.{name}", f"must be a mapping with a kind, not {mapping!r}")
    return {name: from_mapping(mapping, f"{field}.{name}.") for name, mapping in value.items()}


def _distribution(value: object, field: str) -> Distribution:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _build(Constant, {"value": value}, f"{field}.")
    if not isinstance(value, Mapping):
        raise ConfigError(field, f"must be a number or a mapping with a kind, not {value!r}")
    cls, values = _select(DISTRIBUTIONS, value, f"{field}.")
    return _build(cls, values, f"{field}.")


_Cls = typing.TypeVar("_Cls")


def _select(
    known: Mapping[str, type[_Cls]], mapping: Mapping[str, Any], prefix: str
) -> tuple[type[_Cls], dict[str, Any]]:
    values = dict(mapping)
    kind = values.pop("kind", None)
    if kind not in known:
        raise ConfigError(f"{prefix}kind", f"must be one of {', '.join(known)}, not {kind!r}")
    return known[kind], values


def _build(cls: type[_Cls], values: Mapping[str, Any], prefix: str) -> _Cls:
    """`build`, with the prefix also before the names of fields that `cls` itself refuses."""
    try:
        return build(cls, values, prefix)
    except ConfigError as error:
        if error.field.startswith(prefix):
            raise
        raise ConfigError(f"{prefix}{error.field}", str(error).removeprefix(f"{error.field}: ")) from None
