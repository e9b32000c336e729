"""What memory goes to, as the ranks report it once they are ready."""

from __future__ import annotations

from collections.abc import Sequence

from splash.core.memory import ArenaGeometry
from splash.engine.messages import Ready

GIB = 1 << 30


def memory_lines(ready: Sequence[Ready], geometry: ArenaGeometry) -> list[str]:
    """Lines for people. Devices, where ranks have any, are compared with what the ranks account for."""
    arenas = geometry.arena_bytes * geometry.spec.num_layers
    total = sum(rank.weight_bytes for rank in ready)
    lines = [f"weights loaded: {total / GIB:.3f} GiB beside the arenas over {len(ready)} ranks"]
    recording_s = max(rank.graph_seconds for rank in ready)
    if recording_s:
        lines.append(f"decode steps recorded as graphs in {recording_s:.1f} s")
    for rank in ready:
        if rank.device_used_bytes:
            rest = rank.held_bytes - rank.weight_bytes - rank.graph_bytes
            lines.append(
                f"rank {rank.rank} holds {(rank.held_bytes + arenas) / GIB:.2f} GiB: arenas {arenas / GIB:.2f}, "
                f"weights {rank.weight_bytes / GIB:.2f}, graphs {rank.graph_bytes / GIB:.2f}, "
                f"workspace {rest / GIB:.2f}; its device has {rank.device_used_bytes / GIB:.2f} GiB in use"
            )
    return lines
