"""How far serving had come by when, and what one would take who always served in the fastest layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splash.workload import Requests

Floats = npt.NDArray[np.float64]

STRETCHES = 50


def served_s(requests: Requests, first_s: Floats, finish_s: Floats) -> Floats:
    """When each of `STRETCHES` equal shares of the workload's tokens had been served: seconds, ascending.

    A prompt counts when it has brought its first token, the tokens behind that evenly from then to the last.

    Args:
        requests: the workload.
        first_s, finish_s: float64 [N], seconds at which each request had its first and its last token.
    """
    spread = finish_s > first_s
    at_once = requests.input_len + np.where(spread, 1, requests.output_len)
    rate = np.where(spread, requests.output_len - 1, 0) / np.where(spread, finish_s - first_s, 1.0)
    time_s = np.concatenate([first_s, finish_s])
    order = np.argsort(time_s, kind="stable")
    time_s = time_s[order]
    jumps = np.concatenate([at_once, np.zeros(len(first_s))])[order]
    slopes = np.cumsum(np.concatenate([rate, -rate])[order])
    after = np.cumsum(jumps) + np.append(0.0, np.cumsum(slopes[:-1] * np.diff(time_s)))
    tokens = np.maximum.accumulate(np.stack([after - jumps, after], axis=1).ravel())  # before and behind each event
    marks = np.arange(1, STRETCHES + 1) * (tokens[-1] / STRETCHES)
    return np.asarray(np.interp(marks, tokens, np.repeat(time_s, 2)))


def clairvoyant_s(fixed: Sequence[Sequence[float]]) -> float:
    """Seconds of one who serves each stretch of the work in the layout that was fastest over it, and switches for free.

    Layouts may serve requests in another order, so this is no strict bound, but it says how much there is to gain.

    Args:
        fixed: `served_s` of every fixed layout.
    """
    return float(np.diff(np.array(fixed), axis=1, prepend=0.0).min(axis=0).sum())
