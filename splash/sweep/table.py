"""A sweep in the terminal: progress bars while it runs, then a table with a bar for each point's throughput."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from splash.sweep.report import SERIES, families, heading, series_of
from splash.sweep.store import Row
from splash.sweep.svg import short, tokens

COLOURS = dict(zip(SERIES, ("blue", "yellow", "green", "red", "magenta", "bold"), strict=True))
BAR = 16  # characters of the longest bar
MAX_ROWS = 400  # longer tables are left to the report


class Bars:
    """Progress on standard error: all points, and the point that is being measured."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
        )
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    def began(self, total: int, known: int) -> None:
        """`total` points, `known` of which have rows already."""
        self._all = self._progress.add_task("points", total=total, completed=known)

    def advanced(self, label: str, share: float) -> None:
        """The point that is measured has come so far."""
        if self._one is None:
            self._one = self._progress.add_task("", total=100)
        self._progress.update(self._one, description=label, completed=round(100 * share))

    def finished(self, row: Row) -> None:
        """A row has been added."""
        assert self._all is not None
        self._progress.advance(self._all)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def print_tables(rows: Sequence[Row]) -> None:
    """Rows to standard output, a table for each family; bars are shares of the best at the same position."""
    console = Console()
    for members in families(rows):
        best: dict[tuple[float, float], float] = {}
        for row in members:
            if row["status"] == "ok":
                place = (row["input"], row["batch"])
                best[place] = max(best.get(place, 0.0), row["tokens_per_s"])
        table = Table(title=heading(members[0]), title_justify="left", box=None, pad_edge=False)
        for name in ("in x batch", "layout", "tokens/s", "", "first token", "at once", "basis"):
            left = name in ("layout", "", "basis")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for row in members[:MAX_ROWS]:
            table.add_row(*_cells(row, best))
        console.print(table)
        if len(members) > MAX_ROWS:
            console.print(f"... and {len(members) - MAX_ROWS:,} more in the report")
        console.print()


def _cells(row: Row, best: dict[tuple[float, float], float]) -> list[str | Text]:
    name = series_of(row)
    switches = f", {row['switches']:,} switches" if row.get("switches") else ""
    cells = [f"{tokens(row['input'])} x {row['batch']:,}", Text(name + switches, style=COLOURS[name])]
    if row["status"] != "ok":
        return [*cells, "", Text("not servable", style="dim"), "", "", row["basis"]]
    share = row["tokens_per_s"] / best[row["input"], row["batch"]]
    bar = Text("█" * max(1, round(BAR * share)), style=COLOURS[name])
    numbers = [f"{row['first_token_p50_s']:,.3g} s", f"{row['peak_running']:,}"]
    return [*cells, short(row["tokens_per_s"]), bar, *numbers, row["basis"]]
