"""The platforms by name, and which one serves here."""

from __future__ import annotations

import importlib

from splash.core.errors import ConfigError, PlatformUnavailable
from splash.platform.base import Platform

# In order of preference. Modules are loaded when asked for, and none loads torch or a vendor's library on import.
PLATFORMS: dict[str, str] = {
    "cuda": "splash.platform.cuda.platform:CudaPlatform",
    "rocm": "splash.platform.rocm.platform:RocmPlatform",
    "cpu": "splash.platform.cpu.platform:CpuPlatform",
}


def get_platform(name: str) -> Platform:
    """The platform of that name, usable here or not.

    Raises:
        ConfigError: no platform has that name; the message lists those that exist.
    """
    if name not in PLATFORMS:
        raise ConfigError("hardware", f"unknown platform {name!r}; choose one of {', '.join(PLATFORMS)}")
    module, _, attribute = PLATFORMS[name].partition(":")
    platform: Platform = getattr(importlib.import_module(module), attribute)()
    return platform


def require(name: str) -> Platform:
    """The platform of that name, usable here.

    Raises:
        ConfigError: no platform has that name.
        PlatformUnavailable: it is not usable here; the message says why and what to do instead.
    """
    platform = get_platform(name)
    availability = platform.availability()
    if not availability.ok:
        raise PlatformUnavailable(f"{name}: {availability.reason}. {availability.remedy}")
    return platform


def detect() -> Platform:
    """The best platform that is usable here.

    Raises:
        PlatformUnavailable: none is; the message says for each why.
    """
    reasons = []
    for name in PLATFORMS:
        platform = get_platform(name)
        availability = platform.availability()
        if availability.ok:
            return platform
        reasons.append(f"{name}: {availability.reason}. {availability.remedy}")
    raise PlatformUnavailable("no platform is usable here\n  " + "\n  ".join(reasons))
