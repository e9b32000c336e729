"""Models as conf/model offers them, whole and reduced."""

from __future__ import annotations

import pytest

from splash.core.errors import ConfigError
from splash.model.choice import ModelChoice
from splash.serve import read_options
from splash.settings import build, compose, options


def choice(*overrides: str) -> ModelChoice:
    return build(ModelChoice, compose("config", overrides)["model"], "model.")


@pytest.mark.parametrize("name", options("model"))
def test_every_model_can_be_reduced(name: str) -> None:
    whole = choice(f"model={name}")
    few = choice(f"model={name}", "model.num_layers=2")
    assert not whole.is_reduced and few.is_reduced
    assert few.spec().num_layers == 2 <= whole.spec().num_layers
    assert few.spec().head_elements() == whole.spec().head_elements()


def test_fewer_experts() -> None:
    spec = choice("model=deepseek_v3", "model.num_layers=8", "model.num_experts=64").spec()
    assert spec.moe is not None and (spec.num_layers, spec.moe.num_experts, spec.first_dense_layers) == (8, 64, 3)


@pytest.mark.parametrize("override", ["model.num_layers=0", "model.num_layers=62", "model.num_experts=257"])
def test_more_than_there_is_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"must be between 1 and the model's (61|256)"):
        choice("model=deepseek_v3", override).spec()


def test_a_model_that_is_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.path: model 'x' has neither a path nor a config"):
        ModelChoice("x").contents()


def test_serving_without_weights_needs_random_ones() -> None:
    options, config = read_options(["model=deepseek_v3", "load_format=dummy", "model.num_layers=2"])
    assert options.model.name == config.model == "deepseek_v3" and config.load_format == "dummy"
    assert config.model_config is not None and config.model_config["num_hidden_layers"] == 2
    with pytest.raises(ConfigError, match=r"model.path: deepseek_v3 comes without weights; .* or load_format=dummy"):
        read_options(["model=deepseek_v3"])


def test_a_whole_checkpoint_is_read_by_itself() -> None:
    assert read_options([])[1].model_config is None
    reduced = read_options(["model.num_layers=3", "attention.backend=torch"])[1]
    assert reduced.model_config is not None and reduced.model_config["num_hidden_layers"] == 3
    assert reduced.attention.backend == "torch"
