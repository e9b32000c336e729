"""How the prompts that are computed share the rows of a step: the rule, and who may begin under it.

Prompts are served in order of importance and, among equals, of arrival, with one exception: **prompts that have less
than half as much left as the oldest may go before it, the shortest first, and take at most half of the rows.** So a
question does not wait behind a document, and the oldest never takes more than twice as many steps as alone. Nothing
else is shared: cutting the rows between two long prompts would delay one and speed up neither, and shorter prompts
share what they have in common with the one before in the prefix cache only if they begin after it.

Half is where it pays. With h and s rows left at B rows a step, letting the short one have half brings its first token
from (h + s) / B to 2 s / B steps, h - s steps times B earlier, and delays the oldest by s / B: less than is gained
exactly where s < h / 2. A prompt that is passed by becomes the oldest in its turn, which bounds its wait.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from splash.scheduler.request import Order, Request

MAX_SCORED_ROWS = 256  # of prompts in a step, but one each: every one has logits of the whole vocabulary
MAX_UNFINISHED = 2  # prompts of one priority that a request may leave unfinished by beginning before its turn


def share_rows(left: Sequence[int], priority: Sequence[int], budget: int) -> list[int]:
    """Rows of each prompt in the next step.

    Args:
        left: tokens left to compute, at least 1 each, in order of service.
        priority: of each, ascending. Each priority shares what more important ones leave.
        budget: rows, at least 0.

    Returns:
        at most `left` each, and all of the budget that they can use.
    """
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
            later = range(oldest + 1, len(left))
            quick = [i for i in later if 2 * left[i] < wanted and priority[i] == priority[oldest] and not rows[i]]
            quick.sort(key=left.__getitem__)
        rows[oldest] = min(wanted, max(half, budget - sum([left[i] for i in quick])))
        budget -= rows[oldest]
        for i in quick:
            rows[i] = min(left[i], budget)
            budget -= rows[i]
    return rows


@dataclass
class Batch:
    """The rows of the next step as it is put together: one of each request that decodes, the rest shared by prompts.

    Attributes:
        budget: rows for prompts.
        chunks: (place in the order of service, tokens left to compute, request) of each prompt, in that order.
        new: the requests among them that begin in this step. Each has rows, so the ranks hear of all that run.
    """

    budget: int
    chunks: list[tuple[Order, int, Request]]
    new: set[Request] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._left = sum([left for _, left, _ in self.chunks])

    @property
    def is_full(self) -> bool:
        """Whether the prompts can use every row."""
        return self._left >= self.budget

    def rows(self) -> list[int]:
        """Rows of each of `chunks`, not more of those that are scored than the step may have logits of."""
        rows = _rows(self.chunks, self.budget)
        scorable = MAX_SCORED_ROWS
        for at, (_, _, request) in enumerate(self.chunks):
            if rows[at] and request.is_unscored:
                rows[at] = min(rows[at], max(1, scorable))
                scorable -= rows[at]
        return rows

    def admits(self, request: Request, left: int) -> bool:
        """Whether a request with `left` tokens to compute may begin now.

        It has to have rows, as those that began before it in this step, and where it goes before older ones of its
        priority, it may not leave too many unfinished.
        """
        if not self.is_full:
            return True
        own = (request.order, left, request)
        if self.chunks and own > self.chunks[-1] and not any(2 * left < other for _, other, _ in self.chunks):
            return False  # it is nobody's turn but theirs
        chunks = self.chunks.copy()
        insort(chunks, own)
        rows = _rows(chunks, self.budget)
        if not all(count for count, chunk in zip(rows, chunks, strict=True) if chunk is own or chunk[2] in self.new):
            return False
        peers = [(count, chunk) for count, chunk in zip(rows, chunks, strict=True) if chunk[0][0] == request.priority]
        if peers[0][1] is own or any(count == left for count, chunk in peers if chunk is own):
            return True
        return sum(count < chunk[1] for count, chunk in peers) <= MAX_UNFINISHED

    def add(self, request: Request, left: int) -> None:
        """Let a request begin."""
        insort(self.chunks, (request.order, left, request))
        self._left += left
        self.new.add(request)

    def without(self, requests: Collection[Request]) -> Batch:
        """The batch if some requests that were in it, decoding or not, give up their rows."""
        chunks = [chunk for chunk in self.chunks if chunk[2] not in requests]
        decoding = len(requests) - (len(self.chunks) - len(chunks))
        return Batch(self.budget + decoding, chunks, self.new)


def _rows(chunks: Sequence[tuple[Order, int, Request]], budget: int) -> list[int]:
    return share_rows([left for _, left, _ in chunks], [order[0] for order, _, _ in chunks], budget)
