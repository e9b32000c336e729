"""Options become dataclasses, and everything else becomes one clear line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from splash.core.errors import ConfigError
from splash.scheduler.policy import PolicyConfig
from splash.settings import build, compose, groups, pick, usage


@dataclass(frozen=True)
class Inner:
    name: str
    path: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    count: int = 1
    rate: float = 0.5
    on: bool = False
    mode: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    anything: Any = None


def test_build_nests_and_widens_only_int_to_float() -> None:
    mapping = {"inner": {"name": "x"}, "rate": 2, "sizes": [1, 2], "anything": {"k": []}}
    built = build(Outer, mapping)
    assert built == Outer(Inner("x"), rate=2.0, sizes=(1, 2), anything={"k": []})
    assert isinstance(built.rate, float)


@pytest.mark.parametrize(
    ("mapping", "field", "message"),
    [
        ({}, "inner", "is required"),
        ({"inner": {}}, "inner.name", "is required"),
        ({"inner": {"name": "???"}}, "inner.name", "is required"),
        ({"inner": {"name": 3}}, "inner.name", "must be text, not 3"),
        ({"inner": {"name": "x", "pth": "y"}}, "inner.pth", "did you mean path"),
        ({"inner": {"name": "x", "path": 1}}, "inner.path", "must be text"),
        ({"inner": 3}, "inner", "must be a mapping"),
        ({"inner": {"name": "x"}, "count": "1"}, "count", "must be an integer, not '1'"),
        ({"inner": {"name": "x"}, "count": True}, "count", "must be an integer"),
        ({"inner": {"name": "x"}, "count": 1.0}, "count", "must be an integer"),
        ({"inner": {"name": "x"}, "count": None}, "count", "must be an integer"),
        ({"inner": {"name": "x"}, "rate": True}, "rate", "must be a number"),
        ({"inner": {"name": "x"}, "on": 1}, "on", "must be true or false"),
        ({"inner": {"name": "x"}, "mode": "c"}, "mode", "must be one of a, b, not 'c'"),
        ({"inner": {"name": "x"}, "sizes": [1, "2"]}, "sizes[1]", "must be an integer"),
    ],
)
def test_build_refuses(mapping: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        build(Outer, mapping)
    assert refused.value.field == field


def test_compose_takes_overrides_and_groups() -> None:
    config = compose("config", ["layout=dop", "model.path=/a", "hardware=cpu"])
    assert (config["layout"], config["model"]["path"]) == ("dop", "/a")
    assert config["hardware"] == compose("config", ["+hardware=cpu"])["hardware"]
    assert "hardware" not in compose("config", [])


@pytest.mark.parametrize(
    ("override", "field", "message"),
    [
        ("prot=1", "prot", "unknown option; did you mean port"),
        ("+prot=1", "prot", "unknown option; did you mean port"),
        ("model.pth=1", "model.pth", "did you mean path"),
        ("model=nope", "model", "unknown model 'nope'; choose one of .*scribe"),
        ("+hardware=nope", "hardware", "unknown hardware 'nope'; choose one of .*cpu"),
        ("port", "port", "option=value"),
        ("port=[1", "port", "cannot be parsed"),
        ("port=1,2", "port", "one value is wanted"),
    ],
)
def test_compose_says_which_override_is_wrong(override: str, field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        compose("config", ["layout=dop", override, "seed=1"])
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


def test_usage_explains_every_option() -> None:
    text = usage("serve", "config")
    assert "defaults:" not in text
    for option in compose("config", []):
        assert any(line.lstrip("# ").startswith(f"{option}:") and "#" in line for line in text.splitlines()), option
    assert "+hardware=" in text


@pytest.mark.parametrize(
    ("config", "used"),
    [
        ("config", ["hardware", "model", "policy"]),
        ("plan", ["hardware", "model"]),
        ("calibrate", ["hardware", "model"]),
    ],
)
def test_only_the_groups_that_a_config_uses_are_offered(config: str, used: list[str]) -> None:
    assert groups(config) == used
    offered = usage("x", config).partition("\nGroups ")[2].splitlines()[1:]
    assert [line.split("=")[0].strip(" +") for line in offered] == used
    with pytest.raises(ConfigError, match="unknown option") as refused:
        compose(config, ["+workload=poisson"])
    assert refused.value.field == "workload"


def test_a_policy_is_a_group_whose_fields_are_options() -> None:
    assert compose("config", [])["policy"] == {"kind": "static"}
    for kind in ("static", "threshold", "cost"):
        mapping = compose("config", [f"policy={kind}"])["policy"]
        assert build(PolicyConfig, mapping, "policy.") == PolicyConfig(kind)  # type: ignore[arg-type]
    assert build(PolicyConfig, compose("config", ["policy=cost", "policy.margin=0.1"])["policy"]).margin == 0.1
    with pytest.raises(ConfigError, match="unknown policy 'best'; choose one of cost, static, threshold"):
        compose("config", ["policy=best"])


def test_pick_keeps_what_a_dataclass_has() -> None:
    assert pick(Inner, {"name": "x", "count": 1}) == {"name": "x"}
