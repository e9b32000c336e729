"""SchedulerConfig: the limits that every step obeys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of batching.

    Attributes:
        max_num_seqs: most requests that run at once.
        max_batched_tokens: most query rows a step. No more requests than this run at once either, so that each can
            have a row in every step.
        max_model_len: longest prompt plus output in tokens.
        eos_token_ids: tokens that end a request unless it ignores them.
        page_size: token positions a page.
        prefix_cache: requests that begin alike share pages.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    page_size: int
    prefix_cache: bool = False
