"""One workload after another, as a day of serving or a loop of training brings them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from splash.workload.draws import fold
from splash.workload.kinds import MAX_REQUESTS, Workload, require
from splash.workload.requests import Requests


@dataclass(frozen=True, kw_only=True)
class Phases(Workload):
    """Workloads one after another: each begins when every request of the one before has ended.

    The seed of each is folded with this one's and its place, so that parts of one kind draw different requests.
    `priority` is added to that of every part.
    """

    kind: ClassVar[str] = "phases"
    parts: Mapping[str, Workload]

    def __post_init__(self) -> None:
        require("parts", list(self.parts), len(self.parts) >= 1, "at least one workload, by name")

    def __hash__(self) -> int:
        return hash((self.seed, self.priority, *self.parts.items()))

    def requests(self) -> Requests:
        parts = [
            replace(part, seed=fold(self.seed, number, part.seed)).requests()
            for number, part in enumerate(self.parts.values())
        ]
        counts = np.array([len(part) for part in parts])
        require("parts", int(counts.sum()), counts.sum() <= MAX_REQUESTS, f"at most {MAX_REQUESTS} requests in all")
        starts = np.cumsum(counts) - counts
        begins, phases, segments, sessions, begin_s = [], [], [], [], 0.0
        num_segments = num_sessions = 0
        for part, start in zip(parts, starts.tolist(), strict=True):
            begins.append(begin_s)
            phases += [
                replace(phase, start=phase.start + start, begin_s=phase.begin_s + begin_s) for phase in part.phases
            ]
            segments.append(part.segment_start[:-1] + num_segments)
            sessions.append(part.session + num_sessions)
            num_segments += len(part.segment_stream)
            num_sessions += int(part.session.max()) + 1
            begin_s += float(part.time_s[-1])
        return Requests(
            time_s=np.concatenate([part.time_s + begin for part, begin in zip(parts, begins, strict=True)]),
            after=np.concatenate(
                [np.where(part.after < 0, -1, part.after + start) for part, start in zip(parts, starts, strict=True)]
            ),
            delay_s=np.concatenate([part.delay_s for part in parts]),
            output_len=np.concatenate([part.output_len for part in parts]),
            priority=np.concatenate([part.priority + self.priority for part in parts]),
            session=np.concatenate(sessions),
            segment_start=np.append(np.concatenate(segments), num_segments),
            segment_stream=np.concatenate([part.segment_stream for part in parts]),
            segment_len=np.concatenate([part.segment_len for part in parts]),
            output_stream=np.concatenate([part.output_stream for part in parts]),
            phases=tuple(phases),
        )
