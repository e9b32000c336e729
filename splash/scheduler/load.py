"""StepLoad: what a step is made of, as far as its cost in any layout depends on it.

A load is a few arrays with an entry for each query: its owner, its rows, and the positions before them. Everything a
layout's cost asks for is a sum over those arrays, by owner or by the rank that a page number falls on. The sums are
computed once and kept, so that five layouts cost little more than one.

Shape suffixes: q queries, T ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from splash.core.step import StepPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepLoad:
    """The queries of a step. A query of one row is a *single* (a decode), one of more is a *chunk* (of a prefill).

    Attributes:
        ranks: T.
        owner_q: int64 [q], the rank that owns the request, in 0 .. T - 1.
        rows_q: int64 [q], query rows, at least 1.
        start_q: int64 [q], positions cached before the rows; row j sees start + j + 1 keys.
        num_sampled: rows that a token is sampled after.
    """

    ranks: int
    owner_q: Ints
    rows_q: Ints
    start_q: Ints
    num_sampled: int
    _sparse: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.ranks >= 1 and len(self.owner_q) == len(self.rows_q) == len(self.start_q)

    @classmethod
    def of_plan(cls, plan: StepPlan, ranks: int) -> StepLoad:
        """The load of a step that has been planned."""
        queries = plan.queries
        return cls.of_arrays(
            [query.owner for query in queries],
            [len(query.tokens) for query in queries],
            [query.start for query in queries],
            ranks,
            sum(len(query.tokens) if query.score else query.sample for query in queries),
        )

    @classmethod
    def of_arrays(
        cls,
        owner_q: npt.ArrayLike,
        rows_q: npt.ArrayLike,
        start_q: npt.ArrayLike,
        ranks: int,
        num_sampled: int | None = None,
    ) -> StepLoad:
        """A load from arrays or lists, which are not copied where they are int64 arrays already.

        `num_sampled` left out is one a query.
        """
        owner, rows, start = (np.asarray(values, dtype=np.int64) for values in (owner_q, rows_q, start_q))
        return cls(ranks, owner, rows, start, len(owner) if num_sampled is None else num_sampled)

    @classmethod
    def of_parts(
        cls,
        owner_q: Ints,
        start_q: Ints,
        singles_T: Sequence[int],
        single_keys_T: Sequence[int],
        more: Sequence[tuple[int, int, int]],
        num_sampled: int,
    ) -> StepLoad:
        """A load of singles, of which sums are known, and of some queries more.

        Args:
            owner_q, start_q: int64 [q], of the singles.
            singles_T, single_keys_T: by owner, how many they are and the keys that they see.
            more: (owner, rows, start) of the other queries.
            num_sampled: rows that a token is sampled after.
        """
        singles, keys, rows_T = list(singles_T), list(single_keys_T), list(singles_T)
        rows_q = np.ones(len(owner_q) + len(more), dtype=np.int64)
        chunks = []
        if more:
            owners, rows, starts = zip(*more, strict=True)
            owner_q = np.concatenate((owner_q, np.array(owners, dtype=np.int64)))
            start_q = np.concatenate((start_q, np.array(starts, dtype=np.int64)))
            rows_q[len(rows_q) - len(more) :] = rows
            for chunk in more:
                owner, count, start = chunk
                rows_T[owner] += count
                if count > 1:
                    chunks.append(chunk)
                else:
                    singles[owner] += 1
                    keys[owner] += start + 1
        load = cls(len(singles), owner_q, rows_q, start_q, num_sampled)
        load.__dict__.update(  # of cached properties, which would come to the same
            num_rows=sum(rows_T),
            rows_T=rows_T,
            num_chunks=len(chunks),
            num_singles=len(rows_q) - len(chunks),
            singles_T=singles,
            single_keys_T=keys,
            chunks=tuple(chunks),
        )
        return load

    @classmethod
    def decode(cls, batch: int, context: int, ranks: int) -> StepLoad:
        """`batch` equal requests that decode with `context` keys to attend to each, dealt out to the ranks in turn."""
        return cls.of_arrays(np.arange(batch) % ranks, np.ones(batch, int), np.full(batch, context - 1), ranks)

    @classmethod
    def prefill(cls, batch: int, rows: int, start: int, ranks: int) -> StepLoad:
        """`batch` chunks of `rows` after `start` positions each, dealt out to the ranks in turn; none is the last."""
        return cls.of_arrays(np.arange(batch) % ranks, np.full(batch, rows), np.full(batch, start), ranks, 0)

    def next_decode(self) -> StepLoad:
        """The load of the step after this one, which has sampled singles only: the same, one position on."""
        assert not self.num_chunks and self.num_sampled == self.num_singles
        later = StepLoad(self.ranks, self.owner_q, self.rows_q, self.context_q, self.num_sampled)
        keys = [keys + singles for keys, singles in zip(self.single_keys_T, self.singles_T, strict=True)]
        later.__dict__.update(  # of cached properties, which would come to the same
            num_rows=self.num_rows,
            rows_T=self.rows_T,
            num_chunks=0,
            num_singles=self.num_singles,
            singles_T=self.singles_T,
            single_keys_T=keys,
        )
        return later

    @cached_property
    def in_single_rows(self) -> StepLoad:
        """The same rows as singles, which read their history each for itself, of as many requests as before."""
        rows, ends = self.rows_q, np.cumsum(self.rows_q)
        place = np.arange(self.num_rows) - np.repeat(ends - rows, rows)
        singles = StepLoad(
            self.ranks, np.repeat(self.owner_q, rows), np.ones_like(place), np.repeat(self.start_q, rows) + place,
            self.num_sampled,
        )  # fmt: skip
        singles.__dict__["num_queries"] = self.num_queries
        return singles

    # --- all queries ---

    @cached_property
    def num_queries(self) -> int:
        """Requests of the step."""
        return len(self.rows_q)

    @cached_property
    def seen_keys(self) -> int:
        """Pairs of a row and a key that it sees."""
        return int((self.rows_q * self.start_q + self.rows_q * (self.rows_q + 1) // 2).sum())

    @cached_property
    def num_rows(self) -> int:
        """Rows of the step."""
        return int(self.rows_q.sum())

    @cached_property
    def rows_T(self) -> list[int]:
        """[T], rows by owner."""
        return self._by_owner(self.rows_q, self.owner_q)

    @cached_property
    def context_q(self) -> Ints:
        """int64 [q], keys that the last row sees: positions cached after the step."""
        return self.start_q + self.rows_q

    # --- singles ---

    @cached_property
    def _is_single_q(self) -> npt.NDArray[np.bool_]:
        return self.rows_q == 1

    @cached_property
    def num_chunks(self) -> int:
        """Queries of more than one row."""
        return len(self.rows_q) - int(np.count_nonzero(self._is_single_q))

    @cached_property
    def num_singles(self) -> int:
        """Queries of one row."""
        return len(self.rows_q) - self.num_chunks

    @cached_property
    def singles(self) -> tuple[Ints, Ints]:
        """(owner, keys seen) of the singles."""
        if not self.num_chunks:
            return self.owner_q, self.context_q
        return self.owner_q[self._is_single_q], self.context_q[self._is_single_q]

    @cached_property
    def singles_T(self) -> list[int]:
        """[T], singles by owner."""
        return self._by_owner(None, self.singles[0])

    @cached_property
    def single_keys_T(self) -> list[int]:
        """[T], keys that singles see, by owner. A key of a single is a pair of a row and a key as well."""
        owner, keys = self.singles
        return self._by_owner(keys, owner)

    def single_pairs_T(self, top_k: int | None) -> list[int]:
        """[T], pairs of a row and a key that singles attend to, by owner; at most `top_k` a row where it is given."""
        if top_k is None:
            return self.single_keys_T
        if top_k not in self._sparse:
            owner, keys = self.singles
            self._sparse[top_k] = self._by_owner(np.minimum(keys, top_k), owner)
        return self._sparse[top_k]

    def striped_single_keys(self, page_size: int) -> int:
        """Keys of singles on the rank that has most of them when page c is on rank c mod T."""
        return int(striped(self.singles[1], page_size, self.ranks).max())

    # --- chunks ---

    @cached_property
    def chunks(self) -> tuple[tuple[int, int, int], ...]:
        """(owner, rows, start) of the chunks."""
        if not self.num_chunks:
            return ()
        chunk = ~self._is_single_q
        return tuple(
            zip(self.owner_q[chunk].tolist(), self.rows_q[chunk].tolist(), self.start_q[chunk].tolist(), strict=True)
        )

    def striped_chunk_rows(self, page_size: int) -> int:
        """Rows of chunks on the rank that has most of them when the rows of page c are on rank c mod T."""
        chunk = ~self._is_single_q
        start, rows = self.start_q[chunk], self.rows_q[chunk]
        return int((striped(start + rows, page_size, self.ranks) - striped(start, page_size, self.ranks)).max())

    def _by_owner(self, weights: Ints | None, owner: Ints) -> list[int]:
        counts = np.bincount(owner, weights, self.ranks)  # sums in float64, exact to 2^53
        return [int(count) for count in counts.tolist()]


def chunk_pairs(rows: int, start: int, top_k: int | None = None) -> int:
    """Pairs of a row and a key in a chunk of `rows` after `start` positions: row j sees start + j + 1 keys.

    With `top_k` a row attends to at most that many.
    """
    if top_k is None:
        return rows * start + rows * (rows + 1) // 2
    dense = min(max(top_k - start, 0), rows)
    return dense * start + dense * (dense + 1) // 2 + (rows - dense) * top_k


def striped(lengths: Ints, page_size: int, ranks: int) -> Ints:
    """int64 [T], how many of the first `lengths` positions of several sequences lie on pages c with c mod T = rank."""
    periods, rest = np.divmod(lengths, page_size * ranks)
    last, offset = np.divmod(rest, page_size)
    # Ranks before the page that a sequence ends in have a whole page more, that page's rank has `offset` positions.
    ends = np.bincount(last, minlength=ranks)
    more = len(lengths) - np.cumsum(ends)
    held: Ints = int(periods.sum()) * page_size + more * page_size
    return held + np.bincount(last, offset, ranks).astype(np.int64)
