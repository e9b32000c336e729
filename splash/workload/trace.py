"""Traces in the form that Mooncake publishes: one JSON object a line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds. `hash_ids` names the prompt's blocks of 512 tokens, the last of which may be incomplete;
equal ids are equal tokens. A trace holds no tokens: they are made from the ids.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from splash.core.errors import ConfigError
from splash.workload.distributions import MAX_TOKENS, Lognormal, Uniform
from splash.workload.draws import Draw, hashed
from splash.workload.kinds import Agentic, Workload, independent, require
from splash.workload.requests import Requests

BLOCK_TOKENS = 512
_FIELD = re.compile(r"`\$\.(\w+)|field `(\w+)`")


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Trace(Workload):
    """The requests of a trace file.

    Args:
        path: a file, or the name of one under `conf/workload/traces`.
        rate_scale: how many times as fast as recorded.
        max_requests: only the first so many; null takes all.
        max_input_len, max_output_len: cut what is longer; null cuts nothing.
        block_size: tokens that a hash id stands for.
    """

    kind: ClassVar[str] = "trace"
    path: Path
    rate_scale: float = 1.0
    max_requests: int | None = None
    max_input_len: int | None = None
    max_output_len: int | None = None
    block_size: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        require("rate_scale", self.rate_scale, 0 < self.rate_scale < np.inf, "above 0")
        for field in ("max_requests", "max_input_len", "max_output_len"):
            value = getattr(self, field)
            require(field, value, value is None or value >= 1, "at least 1")
        require("block_size", self.block_size, self.block_size >= 1, "at least 1")

    def requests(self) -> Requests:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or a line of it is wrong; the message gives its number and the field.
        """
        lines = self._read()
        lines.sort(key=lambda line: line.timestamp)
        lines = lines[: self.max_requests]
        count = len(lines)
        time_s = np.array([line.timestamp for line in lines]) / (1e3 * self.rate_scale)
        output_len = np.array([line.output_length for line in lines], np.int64)
        recorded = np.array([line.input_length for line in lines], np.int64)
        input_len = np.minimum(recorded, self.max_input_len or MAX_TOKENS)
        # A prompt without ids is one stream of its own.
        named = np.array([line.hash_ids is not None for line in lines])
        kept = np.where(named, -(-input_len // self.block_size), 1)
        start = np.append(0, np.cumsum(kept))
        ids = np.array([one for line, n in zip(lines, kept, strict=True) for one in (line.hash_ids or [0])[:n]])
        owner = np.repeat(np.arange(count), kept)
        place = np.arange(start[-1]) - start[owner]
        left = input_len[owner] - place * self.block_size
        return independent(
            self,
            time_s,
            np.minimum(output_len, self.max_output_len or MAX_TOKENS),
            np.arange(count),
            (
                start,
                np.where(named[owner], hashed(self.key(Draw.BLOCK), ids), hashed(self.key(Draw.OWN), owner)),
                np.where(named[owner], np.minimum(left, self.block_size), left),
            ),
        )

    def _read(self) -> list[_Line]:
        shipped = Path(__file__).parent.parent / "conf" / "workload" / "traces" / self.path
        path = self.path if self.path.exists() or not shipped.exists() else shipped
        decoder = msgspec.json.Decoder(_Line)
        lines = []
        try:
            with path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        lines.append(self._line(decoder, text, f"{path}, line {number}"))
        except OSError as error:
            raise ConfigError("path", f"cannot read {str(path)!r}: {error.strerror}") from None
        if not lines:
            raise ConfigError("path", f"{path} holds no request")
        return lines

    def _line(self, decoder: msgspec.json.Decoder[_Line], text: bytes, where: str) -> _Line:
        try:
            line = decoder.decode(text)
        except msgspec.ValidationError as error:
            found = _FIELD.search(str(error))
            field = f"{found[1] or found[2]}: " if found else ""
            raise ConfigError("path", f"{where}: {field}{error}") from None
        except msgspec.DecodeError as error:
            raise ConfigError("path", f"{where}: no JSON object: {error}") from None
        blocks = -(-line.input_length // self.block_size)
        for field, value, ok, accepted in (
            ("timestamp", line.timestamp, 0 <= line.timestamp < np.inf, "at least 0"),
            ("input_length", line.input_length, 1 <= line.input_length <= MAX_TOKENS, f"between 1 and {MAX_TOKENS}"),
            ("output_length", line.output_length, 1 <= line.output_length <= MAX_TOKENS, f"between 1 and {MAX_TOKENS}"),
        ):
            if not ok:
                raise ConfigError("path", f"{where}: {field}: must be {accepted}, not {value}")
        if line.hash_ids is not None:
            if len(line.hash_ids) != blocks:
                wanted = f"{blocks} for {line.input_length} tokens in blocks of {self.block_size}"
                raise ConfigError("path", f"{where}: hash_ids: must be {wanted}, not {len(line.hash_ids)}")
            if not all(0 <= one < 2**63 for one in line.hash_ids):
                raise ConfigError("path", f"{where}: hash_ids: must be between 0 and {2**63 - 1}, not {line.hash_ids}")
        return line


def write_trace(requests: Requests, path: Path, block_size: int = BLOCK_TOKENS) -> None:
    """Write `requests` as a trace. What waits for another arrives at its `time_s`: a trace knows no dependencies.

    Shared prefixes stay shared in whole blocks; ids are numbered as they first occur.
    """
    offsets, keys = requests.block_keys(block_size, partial=True)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    ids = np.argsort(np.argsort(first))[inverse.reshape(-1)].tolist()
    with path.open("w", encoding="utf-8") as file:
        for index in range(len(requests)):
            record = {
                "timestamp": round(requests.time_s[index] * 1e3),
                "input_length": int(requests.input_len[index]),
                "output_length": int(requests.output_len[index]),
                "hash_ids": ids[offsets[index] : offsets[index + 1]],
            }
            file.write(json.dumps(record) + "\n")


def synthetic_trace(seed: int = 0) -> Requests:
    """What the trace `synthetic.jsonl` was written from: 240 conversations under four system prompts."""
    return Agentic(
        seed=seed,
        num_sessions=240,
        rate=0.5,
        turns=Lognormal(average=4, sigma=0.8, high=16),
        input=Lognormal(average=1500, sigma=1.2, low=16, high=16384),
        tool=Lognormal(average=400, sigma=1.2, high=8192),
        output=Lognormal(average=350, sigma=0.9, low=4, high=2048),
        think=Uniform(2, 40),
        system_prompt=2048,
        num_systems=4,
        max_context=32768,
    ).requests()
