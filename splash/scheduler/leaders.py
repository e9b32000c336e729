"""Leaders: requests that compute pages of a prompt which others that wait begin with too.

Several answers to one prompt, or the same document asked about at once, come before any of their pages is in the cache.
Let in side by side, each would compute all of them. So where a running request is about to compute a page that nobody
has yet, those that begin with the same pages wait for it, and find them in the cache afterwards. They wait for no
longer than that: once the leader's next page is another, or it has none or has gone, they begin as everybody else.

A page's key tells all tokens up to its end, so that two requests with one key in common share all pages before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from splash.scheduler.prefix_cache import PrefixCache
from splash.scheduler.request import Request


class Leaders:
    """The pages that are computed next.

    Args:
        pool: the pages that are there.
        page_size: token positions a page.
        requests: they run and have tokens to compute, the steps in flight apart.
    """

    def __init__(self, pool: PrefixCache, page_size: int, requests: Iterable[Request]) -> None:
        self._pool = pool
        self._page_size = page_size
        # By such a page's number and key, the priority of the most important request that computes it.
        self._priorities: dict[int, dict[bytes, int]] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Take in a request that has begun."""
        page = request.num_computed // self._page_size
        if not request.live or page >= self._num_shareable(request):
            return
        key, priority = request.keys[page], request.priority
        if not self._pool.has(key):
            priorities = self._priorities.setdefault(page, {})
            priorities[key] = min(priorities.get(key, priority), priority)

    def hold(self, request: Request) -> bool:
        """Whether a waiting request had better wait for one that is as important or more so."""
        most = self._num_shareable(request)
        for page, priorities in self._priorities.items():
            if page < most:
                priority = priorities.get(request.keys[page])
                if priority is not None and priority <= request.priority:
                    return not request.is_unscored
        return False

    def _num_shareable(self, request: Request) -> int:
        """Pages of a request that it would not compute if they were there: at least its last token it does."""
        return min(len(request.keys), (len(request.tokens) - 1) // self._page_size)
