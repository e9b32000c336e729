"""From command line to frozen dataclasses: compose the YAML under `conf/`, then build values that check themselves.

Hydra composes plain YAML; what an option may be is said once, by the dataclass that receives it.

    compose("config", ["layout=dop", "+hardware=cpu"]) -> {"layout": "dop", "hardware": {...}, ...}
    build(ServeSettings, mapping)                      -> ServeSettings(...)
    alternatives("layout=dp,dop")                      -> ("layout", ["layout=dp", "layout=dop"])
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import fnmatch
import re
import types
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from splash.core.errors import ConfigError
from splash.model.config import resolve_model_path as resolve_model_path  # entry points take it from here

CONF_DIR = Path(__file__).resolve().parent / "conf"

Settings = TypeVar("Settings")


def compose(config_name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose `conf/<config_name>.yaml` with overrides as Hydra writes them: `key=value`, `group=name`, `+group=name`.

    `hardware=NAME` means `+hardware=NAME`: it is the one group that has no default.

    Raises:
        ConfigError: an override cannot be parsed, or names a key or a file that does not exist.
    """
    adjusted = ["+" + item if item.startswith("hardware=") else item for item in overrides]
    base = _compose(config_name, [])
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    failures = (HydraException, OmegaConfBaseException)
    try:
        config = _compose(config_name, adjusted)
    except failures:
        for count in range(1, len(adjusted) + 1):
            try:
                _compose(config_name, adjusted[:count])
            except failures as error:
                raise _explain(overrides[count - 1], error, base) from None
        raise
    for key in config:  # "+key=value" adds whatever it names
        if key not in base and key not in groups(config_name):
            raise ConfigError(key, _unknown(key, base))
    return config


def build(cls: type[Settings], mapping: Mapping[str, Any], prefix: str = "") -> Settings:
    """Make a dataclass of a mapping, nested dataclasses included. Absent keys take the dataclass's defaults.

    Args:
        cls: a dataclass of bool, int, float, str, Path, Any, mappings, lists, tuples, literals, optionals and
            dataclasses.
        mapping: values as YAML gives them. An int is accepted where a float is meant, nothing else is converted.
        prefix: what goes before a field's name in messages, for example "model.".

    Raises:
        ConfigError: a key is unknown, a value has another type, or a field without a default is absent; or `cls`
            itself refuses a value.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise ConfigError(f"{prefix}{key}", _unknown(str(key), fields))
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in mapping and not _is_missing(mapping[name]):
            values[name] = _convert(hints[name], mapping[name], f"{prefix}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name}", "is required")
    return cls(**values)


def alternatives(override: str) -> tuple[str, list[str]]:
    """The key of an override, and the overrides of one value each that it stands for, as Hydra's multirun reads it.

    `a=1,2`, `a=choice(1,2)` and `a=range(1,3)` stand for several, and so does `group=glob(*)`, which takes the names
    that a group offers.

    Raises:
        ConfigError: the override cannot be parsed, or stands for none.
    """
    parsed = _parse(override)
    key = parsed.get_key_element()
    if not parsed.is_sweep_override():
        return key.lstrip("+~"), [override]
    from hydra.core.override_parser.types import Glob

    value = parsed.value()
    if isinstance(value, Glob):
        known = options(key.lstrip("+"))
        wanted = [name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in value.include)]
        values = [name for name in wanted if not any(fnmatch.fnmatch(name, pattern) for pattern in value.exclude)]
    else:
        values = list(parsed.sweep_string_iterator())
    if not values:
        raise ConfigError(key.lstrip("+"), f"{override.partition('=')[2]!r} stands for no value")
    return key.lstrip("+"), [f"{key}={value}" for value in values]


class Composer:
    """`compose` for many lists of overrides of one root: files are composed once for each choice of groups."""

    def __init__(self, config_name: str) -> None:
        self._config_name = config_name
        self._composed: dict[tuple[str, ...], dict[str, Any]] = {}

    def compose(self, overrides: Sequence[str]) -> dict[str, Any]:
        """What `splash.settings.compose` gives for the same overrides.

        Raises:
            ConfigError: as there.
        """
        plain = [item for item in overrides if self._is_plain(item)]
        groups = tuple(item for item in overrides if item not in plain)
        if groups not in self._composed:
            self._composed[groups] = compose(self._config_name, groups)
        config = copy.deepcopy(self._composed[groups])
        for item in plain:
            parsed = _parse(item)
            *parents, name = parsed.key_or_group.split(".")
            place: Any = config
            for parent in parents:
                place = place.get(parent) if isinstance(place, Mapping) else None
            if not isinstance(place, dict) or name not in place:
                known = place if isinstance(place, Mapping) else config
                raise ConfigError(parsed.key_or_group, _unknown(name, known))
            place[name] = parsed.value()
        return config

    def _is_plain(self, item: str) -> bool:
        key = item.partition("=")[0]
        if key.startswith(("+", "~")) or "@" in key or options(key):
            return False
        return not isinstance(_parse(item).value(), dict)  # mappings are merged


def pick(cls: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The items of `mapping` that are fields of the dataclass `cls`."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in mapping.items() if key in names}


def usage(command: str, config_name: str) -> str:
    """Help for an entry point: its root config, whose comments explain the options, and what the groups offer."""
    lines = [f"usage: {command} [option=value ...]", ""]
    text = (CONF_DIR / f"{config_name}.yaml").read_text(encoding="utf-8")
    lines += _without_defaults(text.splitlines())
    lines += ["", "Groups (group=name; a file's keys are options too, as in model.path=DIR):"]
    for group in groups(config_name):
        plus = "+" if group == "hardware" else ""
        lines.append(f"  {plus}{group}={'|'.join(options(group))}")
    return "\n".join(lines)


def groups(config_name: str) -> list[str]:
    """Config groups that a root config uses, sorted: those in its defaults, and those that it names as `# +GROUP:`."""
    text = (CONF_DIR / f"{config_name}.yaml").read_text(encoding="utf-8")
    named = set(re.findall(r"^(?:  - |# \+)(\w+):", text, re.MULTILINE))
    return sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir() and path.name in named)


def options(group: str) -> list[str]:
    """Names that a config group offers, sorted; none where there is no such group."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


@lru_cache(maxsize=4096)
def _parse(override: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_overrides([override])[0]
    except HydraException as error:
        raise _explain(override, error, {}) from None


def _compose(config_name: str, overrides: list[str]) -> dict[str, Any]:
    # Hydra takes a third of a second to import: only when composing.
    import hydra
    from omegaconf import OmegaConf

    with hydra.initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = hydra.compose(config_name, overrides=overrides)
    return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


def _explain(override: str, error: Exception, base: Mapping[str, Any]) -> ConfigError:
    """Say in one line what is wrong with an override that Hydra refuses."""
    from hydra.errors import MissingConfigException, OverrideParseException

    key, equals, value = override.partition("=")
    key = key.lstrip("+~")
    if isinstance(error, OverrideParseException):
        if not equals:
            return ConfigError(override, "options are written option=value; --help lists them")
        return ConfigError(key or override, f"{value!r} cannot be parsed; quote special characters: {key}=\"'...'\"")
    group = key.partition("@")[0]
    if isinstance(error, MissingConfigException) and (known := options(group)):
        return ConfigError(group, f"unknown {group} {value!r}; choose one of {', '.join(known)}")
    if "Could not override" in str(error):
        parent, _, name = key.rpartition(".")
        siblings: Any = base
        for part in parent.split(".") if parent else []:
            siblings = siblings.get(part) if isinstance(siblings, Mapping) else None
        return ConfigError(key, _unknown(name, siblings if isinstance(siblings, Mapping) else base))
    if "Ambiguous value" in str(error):
        return ConfigError(key, f"one value is wanted, not {value!r}; quote text that contains commas")
    return ConfigError(key, " ".join(str(error).split()))


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, [str(key) for key in known], n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(str(key) for key in known)}"
    return f"unknown option; {hint}"


def _is_missing(value: object) -> bool:
    return isinstance(value, str) and value == "???"


def _convert(hint: Any, value: Any, field: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if len(inner) == 1:
            return _convert(inner[0], value, field)
        for argument in inner:
            try:
                return _convert(argument, value, field)
            except ConfigError:
                continue
        raise _wrong_type(hint, value, field)
    if origin is Literal:
        if value in arguments and type(value) in {type(argument) for argument in arguments}:
            return value
        raise ConfigError(field, f"must be one of {', '.join(map(str, arguments))}, not {value!r}")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _wrong_type(Mapping, value, field)
        return build(hint, value, f"{field}.")
    if origin in (list, tuple, Sequence) and isinstance(value, list | tuple):
        container = list if origin is list else tuple
        item_hint = arguments[0] if arguments else Any
        return container(_convert(item_hint, item, f"{field}[{i}]") for i, item in enumerate(value))
    plain = origin or hint
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if plain is Path and isinstance(value, str):
        return Path(value).expanduser()
    if isinstance(value, bool) and plain is not bool:
        raise _wrong_type(hint, value, field)
    if isinstance(plain, type) and isinstance(value, plain):
        return value
    raise _wrong_type(hint, value, field)


_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    Mapping: "a mapping",
}


def _wrong_type(hint: Any, value: Any, field: str) -> ConfigError:
    plain = typing.get_origin(hint) or hint
    wanted = _WORDS.get(plain, getattr(plain, "__name__", str(hint)))
    return ConfigError(field, f"must be {wanted}, not {value!r}")


def _without_defaults(lines: Sequence[str]) -> list[str]:
    """Drop Hydra's defaults list, which is no option, from a config's lines."""
    kept = []
    inside = False
    for line in lines:
        if line.startswith("defaults:"):
            inside = True
        elif inside and line and not line.startswith((" ", "-")):
            inside = False
        if not inside:
            kept.append(line)
    return kept
