"""Which hardware description fits the machine at hand, with what has been measured on it."""

from __future__ import annotations

import dataclasses

from splash.core.errors import ConfigError
from splash.core.hardware import Hardware, calibrated
from splash.engine.config import EngineConfig
from splash.platform.base import Platform
from splash.platform.registry import detect, require
from splash.settings import build, compose, options


def describe(platform: Platform) -> Hardware:
    """The description in conf/hardware of the platform's devices, found by their name where several could be.

    Raises:
        ConfigError: none names the device, or several could.
    """
    device = platform.devices()[0].name
    known = [build(Hardware, compose("plan", [f"+hardware={name}"])["hardware"]) for name in options("hardware")]
    fitting = [each for each in known if each.platform == platform.name]
    named = [each for each in fitting if each.name in device.lower()] or fitting
    if len(named) != 1:
        names = ", ".join(each.name for each in fitting)
        raise ConfigError(
            "hardware", f"no description names {device!r}; choose with +hardware=NAME: {names}, or add one"
        )
    return named[0]


def with_description(config: EngineConfig) -> EngineConfig:
    """`config` with the calibrated description of this machine, where its policy needs one and it has none.

    Raises:
        ConfigError: no description fits, or its calibration cannot be used.
        PlatformUnavailable: the hardware asked for is not usable here.
    """
    if config.policy.kind != "cost" or config.description is not None:
        return config
    platform = require(config.hardware) if config.hardware else detect()
    return dataclasses.replace(config, description=calibrated(describe(platform)))
