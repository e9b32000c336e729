"""Pace: how fast steps go by, which decides how many prompts come meanwhile, which decides how fast steps go by."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """How steps go on while prompts come.

    Attributes:
        step_s: seconds in which each request decodes one token, on average.
        at_once: prompts that a step carries if it carries any.
    """

    step_s: float
    at_once: float


class Track(NamedTuple):
    """How steps go by: first those of the backlog, then those while prompts come, then those with none.

    Attributes:
        backlog_steps, backlog_s: of the backlog, and how long they take, seconds.
        coming_s: seconds that one takes while prompts come.
        lasting_s: for how long they do.
        alone_s: seconds that one takes after that.
    """

    backlog_steps: float
    backlog_s: float
    coming_s: float
    lasting_s: float
    alone_s: float

    def seconds(self, steps: float) -> float:
        """How long so many steps take."""
        if steps <= self.backlog_steps:
            return self.backlog_s * steps / self.backlog_steps
        steps -= self.backlog_steps
        coming = min(steps, self.lasting_s / self.coming_s)
        return self.backlog_s + coming * self.coming_s + (steps - coming) * self.alone_s

    def steps(self, seconds: float) -> float:
        """Steps in so many seconds, which are not less than the backlog takes."""
        seconds -= self.backlog_s
        coming_s = min(seconds, self.lasting_s)
        return self.backlog_steps + coming_s / self.coming_s + (seconds - coming_s) / self.alone_s
