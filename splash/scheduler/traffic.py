"""Traffic: what has come and gone so far, and from it what to expect.

Output lengths have no known end, so they are treated as lifetimes. From the tokens that finished requests had, and
those that running ones have so far (which will have more) or that others had when they were cut off (which would have
had more), the Kaplan-Meier estimate gives the survival S(a), the share
of requests with more than a tokens, and its integral the mean residual life of a request with a tokens:

    remaining(a) = integral of S from a on / S(a)          [tokens]

Beyond what has been seen a request is expected to go on for as long as it has (Lindy's law, the mean residual life of a
Pareto tail of index 2).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WINDOW_S = 10.0  # arrivals count for about so long
PROMPTS = 64  # prompts that are remembered
FORGOTTEN = 0.1  # arrivals that are worth less than this together no longer count
LULL = 10.0  # a gap of so many mean gaps ends a run of arrivals
OUTPUTS = 1000  # outputs count for about so many finished requests
UNKNOWN_TOKENS = 256.0  # of an output when none has been seen
STALE = 8  # an estimate serves for so many questions or arrivals before it is made anew
GAPS = 3.0  # a gap of so many mean gaps is too long for the rate that was: 5 % of exponential gaps are longer
_BINS_AN_OCTAVE = 4
_NUM_BINS = 24 * _BINS_AN_OCTAVE
_EDGES = 2.0 ** (np.arange(_NUM_BINS + 1) / _BINS_AN_OCTAVE) - 1.0  # tokens; bin b has edges b and b + 1
_WIDTHS = np.diff(_EDGES)


class Arrivals:
    """Rate and prompt lengths of arrivals: exponentially weighted by time, and the last ones."""

    def __init__(self) -> None:
        self._count = 0.0  # arrivals, each worth less the longer ago it was
        self._since_s = 0.0  # when the first of them was
        self._first_s = 0.0  # of those that come one after another now
        self._last_s = 0.0
        self._prompts: deque[int] = deque(maxlen=PROMPTS)
        self._sum = 0
        self._arrived = 0
        self._unevenness: dict[int, tuple[int, float]] = {}  # by chunks: as of how many events, and its value
        self._looked_up = (0, 0)  # tokens looked for and found, in all
        self._queried = 0.0  # the same, older ones worth less
        self._hit = 0.0
        self._rows_begun: Sequence[int] = ()
        self._num_begun = 0

    def add(self, now: float, num_prompt_tokens: int) -> None:
        """A request of so many prompt tokens came at `now` seconds."""
        silence = now - self._last_s
        if silence * self._count > LULL * WINDOW_S or not self._count:
            self._first_s = now
        self._count *= math.exp(-silence / WINDOW_S)
        if self._count < FORGOTTEN:
            self._count, self._since_s = 0.0, now
        self._count += 1.0
        self._last_s = now
        if len(self._prompts) == PROMPTS:
            self._sum -= self._prompts[0]
        self._prompts.append(num_prompt_tokens)
        self._arrived += 1
        self._sum += num_prompt_tokens

    def rate(self, now: float) -> float:
        """Requests a second, as of `now`: those after the first that counts, over the time since, the past worth less.

        A silence that the rate does not explain lowers it at once: bursts end.
        """
        if not self._count:
            return 0.0
        silence, first = now - self._last_s, math.exp((self._since_s - now) / WINDOW_S)
        count = self._count * math.exp(-silence / WINDOW_S)
        # Where all have come at one moment nothing tells a rate but the window.
        rate = count / WINDOW_S if first >= 1 else max(0.0, count - first) / (WINDOW_S * (1 - first))
        return min(rate, GAPS / silence) if silence > 0 else rate

    def lasting_s(self, now: float) -> float:
        """For how long requests have been coming without a lull, which is for how long more they are expected to."""
        return now - self._first_s if self._count else 0.0

    def began(self, num: int, rows: Sequence[int]) -> None:
        """So many prompts have begun so far, and the last ones, of which the last is last, had so many rows to compute.

        What the prefix cache has is no work: turns of one length may bring ten rows or ten thousand.
        """
        self._num_begun, self._rows_begun = num, rows

    def found(self, num_queried: int, num_hit: int) -> None:
        """So many tokens of prompts have been looked for in the prefix cache so far, and so many found."""
        queried, hit = num_queried - self._looked_up[0], num_hit - self._looked_up[1]
        if queried:
            self._looked_up = (num_queried, num_hit)
            keep = math.exp(-queried / (PROMPTS * max(1.0, self.prompt_tokens)))
            self._queried = self._queried * keep + queried
            self._hit = self._hit * keep + hit

    @property
    def found_share(self) -> float:
        """Share of a prompt's tokens that is found in the prefix cache."""
        return min(1.0, max(0.0, self._hit / self._queried)) if self._queried > 0 else 0.0

    def unevenness(self, chunks: int, ranks: int) -> float:
        """`unevenness` of the last prompts, as of a few arrivals and beginnings ago.

        Of what they had to compute, once enough have begun to tell, and of their tokens until then.
        """
        if chunks == 1:
            return 1.0
        events = self._arrived + self._num_begun
        known, value = self._unevenness.get(chunks, (-STALE, 1.0))
        if events - known >= STALE:
            enough = len(self._rows_begun) >= min(PROMPTS, 2 * chunks)
            value = unevenness(self._rows_begun if enough else self._prompts, chunks, ranks)
            self._unevenness[chunks] = events, value
        return value

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of the last prompts; 0 where none has come."""
        return self._sum / len(self._prompts) if self._prompts else 0.0


def unevenness(lengths: Sequence[int], chunks: int, ranks: int) -> float:
    """Rows on the busiest rank over those that it would have if prompts were equal, averaged over steps.

    Args:
        lengths: of some prompts, in the order in which they are computed.
        chunks: prompts a step, which go to the ranks in turn.
        ranks: T.
    """
    steps = len(lengths) // chunks
    if not steps:
        return 1.0
    rows = np.zeros((steps, -(-chunks // ranks) * ranks))
    flat = np.fromiter(lengths, dtype=np.float64, count=len(lengths))
    rows[:, :chunks] = flat[: steps * chunks].reshape(steps, chunks)
    busiest = rows.reshape(steps, -1, ranks).sum(axis=1).max(axis=1).sum()
    return float(busiest / (rows.sum() / chunks * -(-chunks // ranks)))


class Outputs:
    """Output lengths seen, as lifetimes."""

    def __init__(self) -> None:
        self._finished = np.zeros(_NUM_BINS)
        self._cut_off = np.zeros(_NUM_BINS)
        self._table: Floats | None = None
        self._asked = 0  # since the table was made

    def add(self, num_tokens: int, cut_off: bool = False) -> None:
        """A request has ended with so many output tokens, by itself or cut off."""
        self._finished *= 1 - 1 / OUTPUTS
        self._cut_off *= 1 - 1 / OUTPUTS
        ended = self._cut_off if cut_off else self._finished
        ended[min(_NUM_BINS - 1, int(math.log2(num_tokens + 1) * _BINS_AN_OCTAVE))] += 1.0

    def remaining(self, ages: Ints) -> tuple[Floats, float]:
        """Expected tokens that running requests have still to come, and the expected length of a new output.

        Args:
            ages: int64 [n], output tokens of each running request so far.
        """
        if self._table is None or self._asked >= STALE:
            bins = np.minimum(_NUM_BINS - 1, (np.log2(ages + 1) * _BINS_AN_OCTAVE).astype(np.int64))
            self._table = self._mean_residual_life(np.bincount(bins, minlength=_NUM_BINS) + self._cut_off)
            self._asked = 0
        self._asked += 1
        left: Floats = np.interp(ages, _EDGES[:-1], self._table)
        return left, float(self._table[0])

    def _mean_residual_life(self, censored: Floats) -> Floats:
        """[bins], from the start of each bin on, with those running, or cut off, censored at where they are."""
        finished = self._finished
        seen = np.flatnonzero(finished)
        if not len(seen):
            return np.maximum(UNKNOWN_TOKENS, _EDGES[:-1])
        last = int(seen[-1]) + 1  # the bin after all that has been seen
        beyond = np.cumsum((finished + censored)[::-1])[::-1]
        at_risk = np.maximum(beyond - 0.5 * censored, 1e-12)
        alive = np.concatenate(([1.0], np.cumprod(np.maximum(0.0, 1.0 - finished / at_risk))))
        areas = _WIDTHS * (alive[:-1] + alive[1:]) / 2
        areas[last:] = 0.0
        life = np.cumsum(areas[::-1])[::-1] + alive[last] * _EDGES[last]
        table = np.where(alive[:-1] > 1e-9, life / np.maximum(alive[:-1], 1e-9), _EDGES[:-1])
        table[last:] = _EDGES[last:-1]
        return np.maximum(1.0, table)
