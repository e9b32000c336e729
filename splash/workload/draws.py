"""Random numbers by address: a draw is a hash of (key, counter), so any range can be drawn alone and always agrees.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). All arithmetic is modulo 2^64.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bits: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draw(enum.IntEnum):
    """What a key is for. Numbers are part of what a seed means: append, never renumber."""

    OWN = 1  # content of one request or session
    SHARED = 2  # content of a prefix that several requests start with
    OUTPUT = 3  # generated content
    BLOCK = 4  # content of a trace's block
    GROUP = 5  # which shared prefix
    ARRIVAL = 6
    INPUT_LEN = 7
    OUTPUT_LEN = 8
    TURNS = 9
    TOOL_LEN = 10
    THINK = 11


def hashed(key: int | Bits, counters: npt.NDArray[Any]) -> Bits:
    """Hash every counter (at least one axis, integers) under a key, or under its own key. uint64, as broadcast."""
    bits = np.asarray(key, np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(bits ^ (bits >> np.uint64(31)))


def fold(*parts: int) -> int:
    """One 64-bit key of several integers, order included."""
    key = 0
    for part in parts:
        key = int(hashed(key, np.array([part & _MASK], np.uint64))[0])
    return key


def uniform(key: int, counters: npt.NDArray[Any]) -> Floats:
    """One draw a counter, strictly between 0 and 1."""
    return ((hashed(key, counters) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(key: int, counters: npt.NDArray[Any]) -> Floats:
    """One standard normal draw a counter (Box and Muller)."""
    radius = np.sqrt(-2.0 * np.log(uniform(fold(key, 0), counters)))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(fold(key, 1), counters)))


def exponential(key: int, counters: npt.NDArray[Any]) -> Floats:
    """One draw of mean 1 a counter."""
    return np.asarray(-np.log(uniform(key, counters)))
