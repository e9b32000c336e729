"""Makes the policy that a configuration names."""

from __future__ import annotations

from splash.core.errors import ConfigError
from splash.core.layout import LAYOUTS, Projections
from splash.scheduler.cost_model import CostModel
from splash.scheduler.cost_policy import CostPolicy
from splash.scheduler.policy import Limits, Policy, PolicyConfig, StaticPolicy
from splash.scheduler.threshold import ThresholdPolicy


def make_policy(config: PolicyConfig, limits: Limits, model: CostModel | None) -> Policy:
    """The policy.

    Args:
        config: which, and its limits.
        limits: of the engine.
        model: predicts steps; only the cost policy needs one.

    Raises:
        ConfigError: the cost policy has no model.
    """
    if config.kind == "static":
        return StaticPolicy()
    if config.kind == "cost":
        if model is None:
            raise ConfigError(
                "policy", "cost needs the costs of the hardware, and none are known; choose +hardware=NAME"
            )
        return CostPolicy(config, model, limits)
    spec, ranks = limits.geometry.spec, limits.geometry.ranks
    layouts = [
        layout
        for layout in LAYOUTS.values()
        if layout.projections is Projections.REPLICATED or spec.num_heads % ranks == 0
    ]
    return ThresholdPolicy(config, layouts, limits)
