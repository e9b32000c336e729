"""Tokens that the host of a rank does not know yet: sampled by the step before, and still on rank 0's device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from splash.core.step import PENDING_TOKEN, StepPlan
from splash.layouts.rows import StepRows
from splash.platform.base import Rank
from splash.platform.host_copies import upload


class LastTokens:
    """What the last step has sampled, on every rank's device as soon as a step asks for it.

    Tokens of a greedy step are known to every rank. Otherwise only rank 0 samples, and a step that has pending tokens
    begins with a collective in which the others learn them; all know from its plan that it has.

    Args:
        group: the rank.
    """

    def __init__(self, group: Rank) -> None:
        self._group = group
        self._sampled: list[int] = []  # the requests that were sampled, in the order of their tokens
        self._tokens_s = torch.empty(0, dtype=torch.int64, device=group.device)
        self._known = False  # to every rank

    def remember(self, plan: StepPlan, tokens_s: Tensor | None) -> None:
        """Take the tokens of a step in the order of its queries: int64 [samples], None on ranks that do not know."""
        self._known = plan.greedy
        self._sampled = [query.request for query in plan.queries if query.sample]
        self._tokens_s = self._tokens_s.new_empty(0) if tokens_s is None else tokens_s
        assert tokens_s is None or len(tokens_s) == len(self._sampled)

    def fill(self, tokens_N: Tensor, rows: StepRows) -> None:
        """Put them in the place of `PENDING_TOKEN`. Every rank calls this for every step, in the same order.

        Args:
            tokens_N: of `rows` on the device, written to.
            rows: of a step that is about to run.
        """
        pending = np.flatnonzero(rows.tokens_N == PENDING_TOKEN)
        if not len(pending):
            return
        group, sampled, count = self._group, self._sampled, len(self._sampled)
        tokens_s = self._tokens_s
        if group.size > 1 and not self._known:
            tokens_s = group.comm.all_gather(tokens_s, [count, *[0] * (group.size - 1)])
        requests = [rows.queries[query].request for query in rows.query_N[pending].tolist()]
        everyone = np.arange(count)
        places = everyone
        if requests != sampled:  # else the same ones go on, as in most steps
            place = dict(zip(sampled, range(count), strict=True))
            places = np.array([place[request] for request in requests])
        if places is everyone and np.array_equal(pending, everyone):
            tokens_N[:count] = tokens_s
        else:
            index = upload(torch.from_numpy(np.stack((pending, places))), tokens_N.device)
            tokens_N[index[0]] = tokens_s[index[1]]
