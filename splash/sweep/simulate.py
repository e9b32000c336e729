"""Simulated points: the scheduler, the policy and the memory of serving, on a virtual clock."""

from __future__ import annotations

from splash.sweep.disaggregated import run_disaggregated
from splash.sweep.outcome import Outcome
from splash.sweep.points import Point
from splash.workload import Requests


def run_simulated(point: Point, requests: Requests) -> Outcome:
    """Serve `requests` on virtual hardware.

    Raises:
        CapacityError, ConfigError: the point cannot be served.
    """
    if point.settings.serving == "disaggregated":
        return run_disaggregated(point, requests)
    raise NotImplementedError
