"""What a workload asks for, as arrays: when, how long, after what, and which prompts begin alike.

A prompt is a run of segments, each the beginning of a *stream*: an endless sequence of tokens that a 64-bit key stands
for. Prompts whose segments begin alike begin with the same tokens, so sharing is known without any token, and tokens
are made on demand:

    request 0   [system 9: 300 tokens] [session 4: 120 tokens]
    request 7   [system 9: 300 tokens] [session 4: 900 tokens]     420 tokens shared, whatever the block size
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from splash.core.errors import ConfigError
from splash.workload.draws import Bits, Floats, hashed

Ints = npt.NDArray[np.int64]

FIRST_TOKEN_ID = 16  # below are often special tokens


@dataclass(frozen=True)
class Prompt:
    """A prompt by reference: `streams[j]` gives `lengths[j]` tokens, one after the other."""

    length: int
    streams: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Arrival:
    """One request.

    `after` None: it arrives at `time_s`. Else it arrives `delay_s` after request `after` has finished, and `time_s` is
    when that would be if serving took no time.
    """

    index: int
    time_s: float
    after: int | None
    delay_s: float
    prompt: Prompt
    output_len: int
    priority: int
    session: int


@dataclass(frozen=True)
class Phase:
    """Requests that wait until all before them have ended.

    Args:
        start: the first of them; they reach up to the next phase.
        begin_s: when the phase begins if serving takes no time, in seconds on the clock of `Requests.time_s`.
        concurrency: most requests in flight, None for no limit; those that would exceed it wait for any to finish.
    """

    start: int = 0
    begin_s: float = 0.0
    concurrency: int | None = None


@dataclass(frozen=True, eq=False)
class Requests:
    """N requests in order of `time_s`, arrays of one entry each; a request comes after the one that it waits for.

    Args:
        time_s: float64 [N], seconds from the start; for a request that waits, a lower bound.
        after: int64 [N], the request whose end it waits for, -1 for none.
        delay_s: float64 [N], seconds between that end and the arrival; 0 where `after` is -1.
        output_len: int64 [N], tokens to generate, at least 1.
        priority: int64 [N], as the engine understands it.
        session: int64 [N], requests of one conversation or one group of samples.
        segment_start: int64 [N + 1], request i has segments `segment_start[i]:segment_start[i + 1]`, one or more.
        segment_stream: uint64 [M], key of the stream.
        segment_len: int64 [M], tokens, at least 1.
        output_stream: uint64 [N], key of the stream of the generated tokens. Where it is that of the last segment, they
            go on where the prompt ends, so that the next turn's prompt contains them.
        phases: one or more, in order, the first from request 0 and from the start; what waits for a request is of the
            same phase.
    """

    time_s: Floats
    after: Ints
    delay_s: Floats
    output_len: Ints
    priority: Ints
    session: Ints
    segment_start: Ints
    segment_stream: Bits
    segment_len: Ints
    output_stream: Bits
    phases: tuple[Phase, ...] = (Phase(),)

    def __post_init__(self) -> None:
        count = len(self.time_s)
        waits = self.after >= 0
        assert all(len(column) == count for column in (self.after, self.delay_s, self.output_len, self.priority))
        assert len(self.session) == len(self.output_stream) == count and len(self.segment_start) == count + 1
        assert len(self.segment_stream) == len(self.segment_len) == self.segment_start[-1]
        assert np.all(np.diff(self.time_s) >= 0) and np.all(self.time_s >= 0), "requests are in order of time"
        assert np.all(self.after < np.arange(count)), "a request waits for an earlier one"
        starts = np.array([phase.start for phase in self.phases])
        assert (starts[0] == self.phases[0].begin_s == 0 and np.all(np.diff(starts, append=count) >= 1)) or not count
        of = np.searchsorted(starts, np.arange(count), side="right")
        assert np.array_equal(of[self.after[waits]], of[waits]), "a request waits for one of its phase"
        assert np.all(self.delay_s >= 0) and not np.any(self.delay_s[~waits])
        assert np.all(self.output_len >= 1) and np.all(self.segment_len >= 1)
        assert np.all(np.diff(self.segment_start) >= 1), "every prompt has a token"
        for field in fields(self):
            if isinstance(column := getattr(self, field.name), np.ndarray):
                column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.time_s)

    @cached_property
    def input_len(self) -> Ints:
        """Tokens of each prompt, int64 [N]."""
        return np.add.reduceat(self.segment_len, self.segment_start[:-1]) if len(self) else np.zeros(0, np.int64)

    @cached_property
    def shared_len(self) -> Ints:
        """Tokens at the start of each prompt that an earlier request holds too, int64 [N].

        What a prefix cache could save at most: it forgets nothing, and earlier requests are done.
        """
        if not len(self):
            return np.zeros(0, np.int64)
        begin, node = _chain(self.segment_start, self.segment_stream, self.segment_len)
        reach = self.segment_len.copy()
        reach[self.segment_start[1:] - 1] += np.where(self.continues, self.output_len, 0)
        order = np.argsort(node, kind="stable")  # by what leads up to here and goes on; within, by request
        new_group = np.append(True, np.diff(node[order]) != 0)
        band = np.cumsum(new_group).astype(np.int64) << 33  # a running maximum that starts afresh in every group
        longest = np.maximum.accumulate(band + reach[order])
        earlier = np.zeros_like(reach)
        earlier[order[1:]] = longest[:-1] - band[1:]  # below 0 from one group to the next
        shared = np.where(earlier > 0, begin + np.minimum(self.segment_len, earlier), 0)
        return np.maximum.reduceat(shared, self.segment_start[:-1])

    @cached_property
    def continues(self) -> npt.NDArray[np.bool_]:
        """Where the generated tokens go on in the stream of the prompt's last segment, [N]."""
        return np.asarray(self.output_stream == self.segment_stream[self.segment_start[1:] - 1])

    @property
    def most_in_flight(self) -> int:
        """How many requests can be in flight at once, as far as limits say."""
        ends = [*(phase.start for phase in self.phases[1:]), len(self)]
        counts = [end - phase.start for phase, end in zip(self.phases, ends, strict=True)]
        return max(min(phase.concurrency or count, count) for phase, count in zip(self.phases, counts, strict=True))

    def limited(self, concurrency: int) -> Requests:
        """The same requests, at most `concurrency` of them in flight."""
        return replace(self, phases=tuple(replace(phase, concurrency=concurrency) for phase in self.phases))

    def arrivals(self, start: int = 0, stop: int | None = None) -> Iterator[Arrival]:
        """Requests `start` to `stop` as values, for code that takes one at a time."""
        for index in range(*slice(start, stop).indices(len(self))):
            streams, lengths = self._segments(index)
            after = int(self.after[index])
            yield Arrival(
                index=index,
                time_s=float(self.time_s[index]),
                after=after if after >= 0 else None,
                delay_s=float(self.delay_s[index]),
                prompt=Prompt(int(lengths.sum()), tuple(streams.tolist()), tuple(lengths.tolist())),
                output_len=int(self.output_len[index]),
                priority=int(self.priority[index]),
                session=int(self.session[index]),
            )

    def tokens(self, index: int, vocab_size: int, first: int = FIRST_TOKEN_ID) -> Ints:
        """Token ids of prompt `index`, int64 [input_len], each at least `first` and below `vocab_size`."""
        streams, lengths = self._segments(index)
        ends = np.cumsum(lengths)
        offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return _token_ids(np.repeat(streams, lengths), offsets, vocab_size, first)

    def output_tokens(self, index: int, vocab_size: int, first: int = FIRST_TOKEN_ID) -> Ints:
        """Token ids that request `index` is taken to generate, int64 [output_len]."""
        start = self._segments(index)[1][-1] if self.continues[index] else 0
        offsets = start + np.arange(self.output_len[index])
        return _token_ids(self.output_stream[index : index + 1], offsets, vocab_size, first)

    def block_keys(
        self, block_size: int, start: int = 0, stop: int | None = None, *, output: bool = False, partial: bool = False
    ) -> tuple[Ints, Bits]:
        """Name the blocks of requests `start` to `stop`: equal keys mean equal tokens up to the block's end.

        Args:
            block_size: tokens a block.
            output: go on through the generated tokens.
            partial: name an incomplete last block too.

        Returns:
            Offsets int64 [n + 1] and keys uint64: request `start + i` has `keys[offsets[i]:offsets[i + 1]]`.
        """
        if block_size < 1:
            raise ConfigError("block_size", f"must be at least 1, not {block_size}")
        start, stop, _ = slice(start, stop).indices(len(self))
        if stop <= start:
            return np.zeros(1, np.int64), np.zeros(0, np.uint64)
        starts = self.segment_start[start : stop + 1] - self.segment_start[start]
        inside = slice(self.segment_start[start], self.segment_start[stop])
        streams, lengths = self.segment_stream[inside], self.segment_len[inside]
        if output:
            generated, goes_on = self.output_len[start:stop], self.continues[start:stop]
            lengths = lengths.copy()
            lengths[starts[1:] - 1] += np.where(goes_on, generated, 0)
            apart = np.flatnonzero(~goes_on)
            streams = np.insert(streams, starts[1:][apart], self.output_stream[start:stop][apart])
            lengths = np.insert(lengths, starts[1:][apart], generated[apart])
            starts = starts + np.append(0, np.cumsum(~goes_on))
        begin, node = _chain(starts, streams, lengths)
        ends = np.cumsum(lengths)
        totals = np.add.reduceat(lengths, starts[:-1])
        counts = -(-totals // block_size) if partial else totals // block_size
        offsets = np.append(0, np.cumsum(counts))
        owner = np.repeat(np.arange(stop - start), counts)
        number = np.arange(offsets[-1]) - offsets[owner]
        block_end = np.minimum((number + 1) * block_size, totals[owner])
        segment = np.searchsorted(ends, (ends[starts[1:] - 1] - totals)[owner] + block_end - 1, side="right")
        return offsets, hashed(node[segment], block_end - begin[segment])

    def _segments(self, index: int) -> tuple[Bits, Ints]:
        inside = slice(self.segment_start[index], self.segment_start[index + 1])
        return self.segment_stream[inside], self.segment_len[inside]


def _chain(starts: Ints, streams: Bits, lengths: Ints) -> tuple[Ints, Bits]:
    """Of each segment: its first position in its prompt, and a key of all that leads up to it and its stream.

    The key of what leads up is a sum of hashes that know their place, which a running sum gives for all at once.
    """
    owner = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    place = np.arange(len(streams)) - starts[owner]
    part = hashed(hashed(streams, lengths), place)
    before = np.cumsum(part, dtype=np.uint64) - part
    ends = np.cumsum(lengths)
    begin = ends - lengths
    return begin - begin[starts[owner]], hashed(before - before[starts[owner]], streams)


def _token_ids(streams: Bits, offsets: npt.NDArray[Any], vocab_size: int, first: int) -> Ints:
    if not 0 <= first < vocab_size:
        raise ConfigError("vocab_size", f"must be above {first}, the first token id that is drawn, not {vocab_size}")
    return (hashed(streams, offsets) % np.uint64(vocab_size - first)).astype(np.int64) + first


def segments(*parts: tuple[Bits, Ints]) -> tuple[Ints, Bits, Ints]:
    """Put together the segments of N requests, in order: each part is (streams [N], lengths [N]); empty ones vanish.

    Returns:
        `segment_start`, `segment_stream` and `segment_len` of `Requests`.
    """
    streams = np.stack([stream for stream, _ in parts], axis=1)
    lengths = np.stack([length for _, length in parts], axis=1).astype(np.int64)
    kept = lengths > 0
    return np.append(0, np.cumsum(kept.sum(axis=1))), streams[kept], lengths[kept]
