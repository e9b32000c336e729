"""Simulated points: the scheduler, the policy and the memory of serving, on a virtual clock."""

from __future__ import annotations

from splash.core.errors import CapacityError
from splash.engine.simulated import SimulationConfig, simulate
from splash.sweep.disaggregated import run_disaggregated
from splash.sweep.outcome import Outcome, short, thinned
from splash.sweep.points import Point
from splash.workload import Requests


def run_simulated(point: Point, requests: Requests) -> Outcome:
    """Serve `requests` on virtual hardware.

    Raises:
        CapacityError, ConfigError: the point cannot be served.
    """
    settings = point.settings
    if settings.serving == "disaggregated":
        return run_disaggregated(point, requests)
    needed = int((requests.input_len + requests.output_len).max())
    config = SimulationConfig(
        spec=point.spec,
        hardware=point.hardware,
        ranks=point.ranks,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        layout=settings.layout,
        policy=settings.policy,
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_batched_tokens=settings.max_batched_tokens,
        max_model_len=settings.max_model_len or min(needed, point.spec.max_position_embeddings),
        prefix_cache=settings.prefix_cache,
        mem_fraction=settings.mem_fraction,
        kv_cache_gib=settings.kv_cache_gib,
        cheapest_forms=settings.cheapest_forms,
        # Nothing tells how long an answer will be, but that none is longer than the longest.
        max_output_len=int(requests.output_len.max()),
    )
    result = simulate(config, requests)
    if result.refused:
        index, reason = next(iter(result.refused.items()))
        raise CapacityError(f"{len(result.refused)} of {len(requests)} requests are refused; request {index}: {reason}")
    return Outcome(
        seconds=result.seconds,
        arrival_s=result.arrival_s,
        first_token_s=result.first_token_s,
        finish_s=result.finish_s,
        steps=result.steps,
        preemptions=len(result.preemptions),
        peak_running=result.peak_running,
        switches=sum(record.status == "committed" for record in result.switches),
        layout_seconds=result.layout_seconds,
        timeline=thinned(
            [
                [short(row.t_s), row.layout, row.running, row.waiting, short(max(row.kv_used_T), 3)]
                for row in result.timeline
            ]
        )
        if settings.timeline
        else [],
    )
