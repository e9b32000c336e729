"""Pace: how fast steps go by while prompts come, which decides how many come, which decides how fast steps go by.

A round is a step of every request: one, or as many as there are waves where memory does not hold all at once. In N
rounds that take T seconds

    q(N, T) = min(queue + rate x min(T, lasting), places + ending x N)

prompts begin: those that there are, as far as they find a place. n of them that are computed together take k rounds,
and add m seconds to what these take if they only decode, d seconds each. So rounds take, behind a backlog of prompts,

    T = backlog_s + (N - backlog_rounds) d + q m / n,     q <= (N - backlog_rounds) n / k,

since no round computes more than it has room for. As q grows with T, T is solved for.

How many are computed together: those that came while those before them were. Where every round carries some and takes
M = d + m / k, that is n = k min(rate M + queue / R, ending + places / R) with R rounds in all, and never less than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Coming(NamedTuple):
    """The prompts that come.

    Attributes:
        queue: how many wait, behind those that begin at once.
        rate: arrivals a second.
        lasting_s: for how long requests arrive, seconds.
        places: requests that may run besides those that do.
        ending: requests that end a round, and leave a place.
    """

    queue: float
    rate: float
    lasting_s: float
    places: float
    ending: float

    def demand(self, carried: Carried, decode_s: float, seconds: float) -> float:
        """Prompts that begin while those of `carried` are computed, in rounds that all carry some, for that long."""
        round_s = decode_s + carried.more_s / carried.rounds
        rounds = max(1.0, seconds / round_s)
        come = self.rate * round_s if self.lasting_s > 0 else 0.0
        return carried.rounds * min(come + self.queue / rounds, self.ending + self.places / rounds)


class Carried(NamedTuple):
    """Prompts that are computed together, beside decodes.

    Attributes:
        prompts: how many.
        rounds: that it takes.
        more_s: seconds that they add.
    """

    prompts: float
    rounds: float
    more_s: float


NONE = Carried(1.0, 1.0, 0.0)


class Pace(NamedTuple):
    """How rounds go by: those of the backlog first, then those in which prompts come.

    Attributes:
        coming: what comes.
        carried: how it is computed.
        decode_s: seconds of a round without prompts.
        backlog_rounds, backlog_s: of the backlog, and the seconds that they take.
    """

    coming: Coming
    carried: Carried
    decode_s: float
    backlog_rounds: float = 0.0
    backlog_s: float = 0.0

    def seconds(self, rounds: float) -> float:
        """How long so many rounds take."""
        if rounds <= self.backlog_rounds:
            return self.backlog_s * rounds / self.backlog_rounds
        coming, (prompts, each_rounds, more_s) = self.coming, self.carried
        behind, each_s = rounds - self.backlog_rounds, more_s / prompts
        alone = self.backlog_s + behind * self.decode_s
        room = min(coming.places + coming.ending * rounds, behind * prompts / each_rounds)
        waiting, busy = alone + each_s * coming.queue, each_s * coming.rate  # a share of the time
        if busy < 1 and waiting <= coming.lasting_s * (1 - busy):
            all_s = waiting / (1 - busy)
        else:
            all_s = waiting + busy * coming.lasting_s
        return min(all_s, alone + each_s * room)

    def rounds(self, seconds: float) -> float:
        """Rounds in so many seconds, which are not less than the backlog takes. `seconds` the other way round."""
        coming, (prompts, each_rounds, more_s) = self.coming, self.carried
        left, each_s = max(0.0, seconds - self.backlog_s), more_s / prompts
        there = coming.queue + coming.rate * min(seconds, coming.lasting_s)
        room = coming.places + coming.ending * self.backlog_rounds
        behind = max(
            (left - each_s * there) / self.decode_s,
            (left - each_s * room) / (self.decode_s + each_s * coming.ending),
            left / (self.decode_s + more_s / each_rounds),
        )
        return self.backlog_rounds + behind


def carried_together(
    coming: Coming, carry: Callable[[int], Carried], decode_s: float, seconds: float, most: int
) -> Carried:
    """The prompts that are computed together, at least one and at most `most`, while they come for so many seconds.

    Args:
        coming: what comes.
        carry: what it takes to compute so many together.
        decode_s: seconds of a round without prompts.
        seconds: for how long.
        most: prompts that a step has rows for.

    The number is where the demand for n meets n, both taken to be straight lines through n = 1 and as many as come
    while that one is computed: two numbers are asked for, since each may cost two predictions of a step.
    """
    one = carry(1)
    more = coming.demand(one, decode_s, seconds)
    if more <= 1 or most == 1:
        return one
    many = carry(min(most, math.ceil(more)))
    span = many.prompts - 1
    slope = (coming.demand(many, decode_s, seconds) - more) / span
    prompts = min(float(most), 1 + (more - 1) / (1 - slope)) if slope < 1 else float(most)
    share = (prompts - 1) / span
    return Carried(
        prompts,
        max(one.rounds, one.rounds + share * (many.rounds - one.rounds)),
        max(one.more_s, one.more_s + share * (many.more_s - one.more_s)),
    )
