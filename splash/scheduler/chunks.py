"""How the prompts that are computed share the rows of a step: the rule, and who may begin under it.

**By turn.** Prompts are served in order of importance and, among equals, of arrival, with one exception: prompts that
have less than half as much left as the oldest may go before it, the shortest first, and take at most half of the rows.
So a question does not wait behind a document, and the oldest never takes more than twice as many steps as alone.
Nothing else is shared: cutting the rows between two long prompts would delay one and speed up neither, and shorter
prompts share what they have in common with the one before in the prefix cache only if they begin after it.

Half is where it pays. With h and s rows left at B rows a step, letting the short one have half brings its first token
from (h + s) / B to 2 s / B steps, h - s steps times B earlier, and delays the oldest by s / B: less than is gained
exactly where s < h / 2. A prompt that is passed by becomes the oldest in its turn, which bounds its wait.

**By owner.** Where pages are kept by request, a chunk is attended to by its owner alone, and a step takes as long as
the busiest rank. There the rows of a step are first shared among the owners that have prompts, of each importance in
turn, so that every rank has as many rows as any other, decodes included, as far as it has work; each owner's share then
goes by turn. So T long prompts of T owners are computed at once, in steps whose busiest rank has a T-th of the rows.
The owner of the oldest has at least half of an equal share however many requests it decodes, so the oldest has rows in
every step: at least a 2T-th of them, or a 4T-th where its rank decodes far more than others.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from splash.core.layout import KV, Layout
from splash.scheduler.request import Order, Request

MAX_SCORED_ROWS = 256  # of prompts in a step, but one each: every one has logits of the whole vocabulary
MAX_UNFINISHED = 2  # prompts of one priority that a request may leave unfinished by beginning before its turn


def share_rows(
    left: Sequence[int],
    priority: Sequence[int],
    budget: int,
    owner: Sequence[int] | None = None,
    busy_T: Sequence[int] = (),
) -> list[int]:
    """Rows of each prompt in the next step.

    Args:
        left: tokens left to compute, at least 1 each, in order of service.
        priority: of each, ascending. Each priority shares what more important ones leave.
        budget: rows, at least 0.
        owner: of each, where its owner alone computes it; None where every rank takes part.
        busy_T: rows that each rank has beside these; asked for only with `owner`.

    Returns:
        at most `left` each, and all of the budget that they can use.
    """
    if sum(left) <= budget:
        return list(left)
    owner, work = ([0] * len(left), [0]) if owner is None else (owner, list(busy_T))
    rows = [0] * len(left)
    first = 0
    while budget and first < len(left):
        end = bisect_right(priority, priority[first])
        peers: dict[int, list[int]] = {}
        for at in range(first, end):
            peers.setdefault(owner[at], []).append(at)
        wanted = [sum([left[at] for at in own]) for own in peers.values()]
        shares = _share_by_owner([work[rank] for rank in peers], wanted, budget)
        for (rank, own), share in zip(peers.items(), shares, strict=True):
            work[rank] += share
            for at, count in zip(own, _share_by_turn([left[at] for at in own], share), strict=True):
                rows[at] = count
        budget -= sum(shares)
        first = end
    return rows


def _share_by_turn(left: Sequence[int], budget: int) -> list[int]:
    """Rows of prompts of equal importance: of the oldest, and of those that may go before it."""
    if sum(left) <= budget:
        return list(left)
    rows = [0] * len(left)
    for oldest, wanted in enumerate(left):
        if not budget:
            break
        if rows[oldest]:
            continue  # has been let before an older one
        half = budget - budget // 2
        quick: list[int] = []
        if wanted > half:
            quick = [i for i in range(oldest + 1, len(left)) if 2 * left[i] < wanted and not rows[i]]
            quick.sort(key=left.__getitem__)
        rows[oldest] = min(wanted, max(half, budget - sum([left[i] for i in quick])))
        budget -= rows[oldest]
        for i in quick:
            rows[i] = min(left[i], budget)
            budget -= rows[i]
    return rows


def _share_by_owner(work: Sequence[int], wanted: Sequence[int], budget: int) -> list[int]:
    """Rows of some owners that have `work` rows already: as even as can be, half of an equal share for the first."""
    if sum(wanted) <= budget:
        return list(wanted)
    shares = _even_out(work, wanted, budget)
    least = min(wanted[0], -(-budget // (2 * len(wanted))))
    if shares[0] < least:
        shares = [least, *_even_out(work[1:], wanted[1:], budget - least)]
    return shares


def _even_out(work: Sequence[int], wanted: Sequence[int], budget: int) -> list[int]:
    """Deal out rows where there is least work, at most `wanted` each, which is more than `budget` in all."""
    if len(wanted) == 1:
        return [budget]

    # The level up to which all are filled: so many of them take rows between two places where that number changes.
    edges = [(done, 1) for done in work] + [(done + most, -1) for done, most in zip(work, wanted, strict=True)]
    edges.sort()
    level, dealt, taking = edges[0][0], 0, 0
    for place, change in edges:
        more = taking * (place - level)
        if dealt + more > budget:
            level += (budget - dealt) // taking
            break
        level, dealt, taking = place, dealt + more, taking + change
    shares = [min(most, max(0, level - done)) for done, most in zip(work, wanted, strict=True)]
    rest = budget - sum(shares)
    for at, (done, most) in enumerate(zip(work, wanted, strict=True)):
        if rest and shares[at] < most and done <= level:
            shares[at] += 1
            rest -= 1
    return shares


class Prompt(NamedTuple):
    """A prompt in work: its place in the order of service, tokens left to compute, its request, and the owner."""

    order: Order
    left: int
    request: Request
    owner: int


class _Turn(NamedTuple):
    """What those that share rows leave to others: the last of them, the longest, and whether any lacks rows."""

    last: Prompt
    longest: int
    lacks_rows: bool


@dataclass
class Batch:
    """The rows of the next step as it is put together: one of each request that decodes, the rest shared by prompts.

    Attributes:
        budget: rows for prompts.
        chunks: each prompt, in order of service.
        busy_T: requests that each rank decodes, where owners alone compute what is theirs; None elsewhere.
        new: the requests among them that begin in this step. Each has rows, so the ranks hear of all that run.
    """

    budget: int
    chunks: list[Prompt]
    busy_T: list[int] | None
    new: set[Request] = field(default_factory=set)
    _rows: list[int] | None = field(default=None, init=False)
    _turns: dict[int, _Turn] = field(default_factory=dict, init=False)
    # The chunks with one more, as `admits` was asked for last, and their rows.
    _tried: tuple[list[Prompt], list[int]] = field(default=([], []), init=False)

    def __post_init__(self) -> None:
        self._left = sum([chunk.left for chunk in self.chunks])

    @classmethod
    def of_step(cls, layout: Layout, max_rows: int, running_T: Sequence[int], chunks: list[Prompt]) -> Batch:
        """A step in a layout, of at most `max_rows`, where all running requests but those of `chunks` decode."""
        busy_T = None
        if layout.kv is KV.REQUEST:
            busy_T = list(running_T)
            for chunk in chunks:
                busy_T[chunk.owner] -= 1
        return cls(max_rows - (sum(running_T) - len(chunks)), chunks, busy_T)

    def rows(self) -> list[int]:
        """Rows of each of `chunks`, not more of those that are scored than the step may have logits of."""
        rows, scorable = list(self._shared_rows()), MAX_SCORED_ROWS
        for at, chunk in enumerate(self.chunks):
            if rows[at] and chunk.request.is_unscored:
                rows[at] = min(rows[at], max(1, scorable))
                scorable -= rows[at]
        return rows

    def _shared_rows(self) -> list[int]:
        if self._rows is None:
            self._rows = self._share(self.chunks)
        return self._rows

    def admits(self, request: Request, left: int, owner: int) -> bool:
        """Whether a request with `left` tokens to compute may begin now with that owner.

        It has to have rows, as those that began before it in this step, and where it goes before older ones of its
        priority, it may not leave too many unfinished among those that it shares rows with.
        """
        if self._left + left <= self.budget:
            return True
        own = Prompt(request.order, left, request, owner)
        turn = self._turn(owner)
        if turn is not None and turn.lacks_rows and own > turn.last and 2 * left >= turn.longest:
            return False  # it is nobody's turn but theirs
        chunks = self.chunks.copy()
        insort(chunks, own)
        rows = self._share(chunks)
        self._tried = chunks, rows
        shared = list(zip(rows, chunks, strict=True))
        if not all([count for count, chunk in shared if chunk is own or chunk.request in self.new]):
            return False
        peers = [
            (count, chunk)
            for count, chunk in shared
            if chunk.order[0] == request.priority and (self.busy_T is None or chunk.owner == owner)
        ]
        if peers[0][1] is own or any(count == left for count, chunk in peers if chunk is own):
            return True
        return sum(count < chunk.left for count, chunk in peers) <= MAX_UNFINISHED

    def add(self, request: Request, left: int, owner: int) -> None:
        """Let a request begin."""
        insort(self.chunks, Prompt(request.order, left, request, owner))
        self._left += left
        self.new.add(request)
        chunks, rows = self._tried
        self._rows = rows if chunks == self.chunks else None
        self._turns.clear()

    def without(self, requests: Collection[Request]) -> Batch:
        """The batch if some requests that were in it, decoding or not, give up their rows."""
        chunks = [chunk for chunk in self.chunks if chunk.request not in requests]
        prompts = {chunk.request for chunk in self.chunks}
        decoding = [request for request in requests if request not in prompts]
        busy_T = None if self.busy_T is None else self.busy_T.copy()
        if busy_T is not None:
            for request in decoding:
                assert request.held is not None
                busy_T[request.held.owner] -= 1
        return Batch(self.budget + len(decoding), chunks, busy_T, self.new)

    def _share(self, chunks: Sequence[Prompt]) -> list[int]:
        left, priorities = [chunk.left for chunk in chunks], [chunk.order[0] for chunk in chunks]
        if self.busy_T is None:
            return share_rows(left, priorities, self.budget)
        return share_rows(left, priorities, self.budget, [chunk.owner for chunk in chunks], self.busy_T)

    def _turn(self, owner: int) -> _Turn | None:
        """What there is to know of those that a request of that owner would share rows with, None if nobody."""
        if not self._turns:
            for count, chunk in zip(self._shared_rows(), self.chunks, strict=True):
                rank = 0 if self.busy_T is None else chunk.owner
                before = self._turns.get(rank)
                longest, lacks_rows = (before.longest, before.lacks_rows) if before is not None else (0, False)
                self._turns[rank] = _Turn(chunk, max(longest, chunk.left), lacks_rows or count < chunk.left)
        return self._turns.get(0 if self.busy_T is None else owner)
