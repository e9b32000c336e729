"""`python -m splash.sweep`: run a sweep, keep its rows, and write CSV and report beside them.

Exit codes: 0 done, 1 a rank died, 2 an option cannot work, 130 interrupted: the same command goes on where it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from splash.core.errors import SplashError, WorkerError
from splash.settings import usage
from splash.sweep.points import read_sweep
from splash.sweep.report import report
from splash.sweep.runner import run_sweep
from splash.sweep.store import write_csv
from splash.sweep.table import Bars, print_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep of a command line. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(usage("python -m splash.sweep", "sweep"))
        return 0
    try:
        run, points = read_sweep(arguments)
        with Bars() as bars:
            rows = run_sweep(run, points, bars)
        page = run.folder / "report.html"
        page.write_text(report(run.sweep, rows), encoding="utf-8")
        write_csv(run.folder / "rows.csv", rows)
    except SplashError as error:
        print(f"splash.sweep: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, WorkerError) else 2
    except KeyboardInterrupt:
        print("splash.sweep: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    if run.format == "json":
        measured = sum(row["basis"] == "measured" for row in rows)
        print(json.dumps({"folder": str(run.folder), "points": len(rows), "measured": measured}))
    else:
        print_tables(rows)
        print(f"\n{page}, rows.csv and rows.jsonl beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
