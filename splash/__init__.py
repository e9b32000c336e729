"""SPLASH: an LLM inference engine in which the parallel layout of attention is a value.

`LLM` generates in this process, without a server; `SamplingParams` says how tokens are chosen. Both load on first
use: importing the package costs nothing, so that `splash.core` and the tools that plan without hardware stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splash.core.request import SamplingParams
    from splash.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOME = {"LLM": "splash.llm", "SamplingParams": "splash.core.request"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'splash' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
