"""Rows on disk: a JSON object a line, appended as points finish, so that an interrupted sweep goes on where it was."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from splash.core.errors import ConfigError

Row = dict[str, Any]


class RowStore:
    """The rows of a folder, by key.

    Opening it reads `rows.jsonl`. A last line without an end is what an interrupted write left, and is cut off.

    Args:
        folder: made where it is missing.
        fresh: forget the rows that are there.

    Raises:
        ConfigError: the folder cannot be used, or holds something else than rows.
    """

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.path = folder / "rows.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data = b"" if fresh or not self.path.exists() else self.path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            self._rows = {row["key"]: row for row in _parse(self.path, whole)}
            if fresh or len(whole) < len(data):
                _replace(self.path, whole)
            self._file = self.path.open("ab")
        except OSError as error:
            raise ConfigError("out", f"{folder} cannot be used: {error.strerror}") from None

    def get(self, key: str) -> Row | None:
        """The row of a point, None where it has not been run."""
        return self._rows.get(key)

    def add(self, row: Row) -> None:
        """Keep a row. It is on the disk when this returns."""
        self._file.write(encode(row))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._rows[row["key"]] = row

    def close(self, keys: Sequence[str] = ()) -> None:
        """Put the rows of `keys` in that order, before all others, and close the file."""
        self._file.close()
        if keys:
            chosen = {key: self._rows[key] for key in keys} | self._rows
            _replace(self.path, b"".join(map(encode, chosen.values())))


def encode(row: Row) -> bytes:
    """A row as a line."""
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that is whole.

    Raises:
        ConfigError: it holds something else than rows.
    """
    return _parse(path, path.read_bytes())


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """The rows as CSV, without what has a value for each of many times. Mappings are JSON."""
    rows = [{key: value for key, value in row.items() if key not in ("timeline", "served_s")} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            flat = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in row.items()}
            writer.writerow(flat)
    beside.replace(path)


def _parse(path: Path, data: bytes) -> list[Row]:
    rows = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise ConfigError("out", f"{path}, line {number}, is no row of a sweep; choose another folder")
        rows.append(row)
    return rows


def _replace(path: Path, data: bytes) -> None:
    """Write all of a file at once: readers and interruptions see the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)
