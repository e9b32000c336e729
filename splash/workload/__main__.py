"""Print what a workload amounts to: `python -m splash.workload workload=agentic workload.num_sessions=100`."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from splash.core.errors import ConfigError
from splash.settings import options
from splash.workload import load, summarise

USAGE = """usage: python -m splash.workload workload=NAME [workload.KEY=VALUE ...] [format=table|json]

Workloads, each a file of conf/workload whose keys are options:"""


def main(arguments: Sequence[str]) -> int:
    """Summarise the workload that `arguments` name; 2 where they are wrong."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, *(f"  {name}" for name in options("workload")), sep="\n")
        return 0
    chosen = dict(item.partition("=")[::2] for item in arguments if item.startswith(("workload=", "format=")))
    overrides = [item for item in arguments if not item.startswith(("workload=", "format="))]
    style = chosen.get("format", "table")
    try:
        if style not in ("table", "json"):
            raise ConfigError("format", f"must be table or json, not {style!r}")
        began = time.perf_counter()
        requests = load(chosen.get("workload", ""), overrides).requests()
        took_s = time.perf_counter() - began
        summary = summarise(requests)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dataclasses.asdict(summary)) if style == "json" else f"{summary.table()}\nmade in {took_s:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
