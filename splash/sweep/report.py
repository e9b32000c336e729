"""The report of a sweep: one HTML file that needs nothing else, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import splash
from splash.core.layout import LAYOUTS
from splash.sweep.charts import bar_chart, leader_map, line_chart, time_line
from splash.sweep.points import Sweep
from splash.sweep.store import Row
from splash.sweep.svg import tokens

SERIES = (*LAYOUTS, "adaptive")
COLUMNS = (
    "grid", "hardware", "model", "workload", "layout", "policy", "input", "output", "batch", "chunk", "basis",
    "tokens_per_s", "seconds", "first_token_p50_s", "between_tokens_mean_ms", "preemptions", "peak_running", "switches",
)  # fmt: skip


def series_of(row: Row) -> str:
    """The name under which a row is drawn: its layout, or "adaptive" where a policy changes it."""
    return str(row["layout"]) if row["policy"] == "static" else "adaptive"


def leaders(rows: Iterable[Row]) -> dict[tuple[float, float], tuple[str, float, float]]:
    """By (input, batch): the series with most tokens a second, that rate, and by how much it leads the next, a share.

    Positions with fewer than two rows that could be served are left out.
    """
    rates: dict[tuple[float, float], dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok":
            rates.setdefault((row["input"], row["batch"]), {})[series_of(row)] = row["tokens_per_s"]
    found = {}
    for place, by_name in rates.items():
        if len(by_name) > 1:
            (first, name), (second, _) = sorted(((rate, name) for name, rate in by_name.items()), reverse=True)[:2]
            found[place] = (name, first, first / second - 1)
    return found


def families(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that belong together: one grid and model on one kind of hardware, with one kind of workload."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        shape = tuple(row[name] for name in ("grid", "hardware", "model", "ranks", "dtype", "kv_dtype", "chunk"))
        found.setdefault((*shape, row["output"] if _is_fixed(row) else row["workload"]), []).append(row)
    return list(found.values())


def heading(row: Row) -> str:
    """What the family of a row is called."""
    cache = "" if row["kv_dtype"] == row["dtype"] else f", cache in {row['kv_dtype']}"
    load = f"{row['output']:,.0f} tokens out" if _is_fixed(row) else f"workload {row['workload']}"
    where = f"{row['model']} on {row['ranks']} x {row['hardware']}, {row['dtype']}{cache}"
    return f"{row['grid']}: {where}, {load}, {row['chunk']:,} tokens a step"


def report(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The page, for rows in order."""
    body = "".join(map(_family, families(rows)))
    about = f"<p>{escape(sweep.about)}</p>" if sweep.about else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(sweep.title)}</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>\n'
        f"<body><h1>{escape(sweep.title)}</h1>{about}<p>{_counts(rows)}</p><p>{_legend(rows)}</p>\n{body}\n"
        f"<h2>All points</h2>{_table(rows)}<footer>SPLASH {splash.__version__}. Rates are tokens in and out over the "
        "time from the first arrival to the last finish.</footer></body></html>\n"
    )


def _family(rows: Sequence[Row]) -> str:
    first = rows[0]
    basis = sorted({row["basis"] for row in rows})
    why = sorted({row["why"] for row in rows})
    chips = "".join(f'<span class="chip {name}">{name}</span>' for name in basis)
    served = [row for row in rows if row["status"] == "ok"]
    charts = _throughput(served) if _is_fixed(first) else _comparison(served)
    charts += [*_capacity(rows), *_admission(served)]
    charts += [
        time_line(f"{series_of(row)}: load, memory and layout over time", row["timeline"])
        for row in served
        if row.get("timeline")
    ]
    refused = {f"{series_of(row)}: {row['reason']}" for row in rows if row["status"] != "ok"}
    notes = "".join(f"<li>{escape(text)}</li>" for text in sorted(refused))
    notes = f"<details><summary>{len(refused)} kinds of points could not be served</summary><ul>{notes}</ul></details>"
    return (
        f"<section><h2>{escape(heading(first))}</h2><p>{chips} {escape('; '.join(why))}</p>"
        f'<div class="charts">{"".join(f"<figure>{chart}</figure>" for chart in charts)}</div>'
        f"{notes if refused else ''}</section>\n"
    )


def _throughput(rows: Sequence[Row]) -> list[str]:
    """Lines by input length and by batch, and who leads where."""
    charts = []
    for axis, label, text, here in _cuts(rows):
        charts.append(_lines(f"Throughput by {axis}, {text}", label, "tokens/s", here, axis, "tokens_per_s"))
    found = leaders(rows)
    if len(found) > 1:
        charts.append(leader_map("Leading layout, and its lead", found))
    return charts


def _cuts(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, list[Row]]]:
    """(axis, its label, what is fixed, rows) of each line through the grid, but those much shorter than others."""
    for axis, other, label in (("input", "batch", "input, tokens"), ("batch", "input", "batch")):
        places = {value: {row[axis] for row in rows if row[other] == value} for value in {row[other] for row in rows}}
        longest = max(map(len, places.values()), default=0)
        for value in sorted(places):
            if len(places[value]) > max(1, longest // 2):
                text = f"batch {value:g}" if other == "batch" else f"{tokens(value)} tokens in"
                yield axis, label, text, [row for row in rows if row[other] == value]


def _comparison(rows: Sequence[Row]) -> list[str]:
    """Bars of one workload's throughput, with the ratio of the best to each."""
    rates = {series_of(row): row["tokens_per_s"] for row in rows}
    if not rates:
        return []
    best = max(rates.values())
    notes = {name: "" if rate == best else f"(best is {best / rate:.2f}x)" for name, rate in rates.items()}
    return [bar_chart("Throughput", "tokens/s", rates, notes)]


def _capacity(rows: Sequence[Row]) -> list[str]:
    held = {row["layout"]: row["kv_tokens"] for row in rows if "kv_tokens" in row}
    if not held:
        return []
    base = held.get("dp", 0)
    notes = {name: f"({value / base - 1:+.1%})" if base and name != "dp" else "" for name, value in held.items()}
    return [bar_chart("KV capacity, against dp", "tokens", held, notes)]


def _admission(rows: Sequence[Row]) -> list[str]:
    """Most requests that were resident at once, where that differs among layouts."""
    charts = []
    for axis, label, text, here in _cuts(rows):
        seen: dict[float, set[int]] = {}
        for row in here:
            seen.setdefault(row[axis], set()).add(row["peak_running"])
        if any(len(counts) > 1 for counts in seen.values()):
            charts.append(_lines(f"Admission: most at once, {text}", label, "requests", here, axis, "peak_running"))
    return charts


def _lines(title: str, x_label: str, y_label: str, rows: Sequence[Row], axis: str, figure: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    basis = {}
    for row in sorted(rows, key=lambda row: (SERIES.index(series_of(row)), row[axis])):
        series.setdefault(series_of(row), []).append((row[axis], row[figure]))
        basis[series_of(row)] = row["basis"]
    return line_chart(title, x_label, y_label, series, basis)


def _is_fixed(row: Mapping[str, Any]) -> bool:
    return row["workload"] == "fixed"


def _counts(rows: Sequence[Row]) -> str:
    by = {name: sum(row["basis"] == name for row in rows) for name in ("measured", "simulated")}
    refused = sum(row["status"] != "ok" for row in rows)
    return f"{len(rows)} points: {by['measured']} measured, {by['simulated']} simulated; {refused} cannot be served."


def _legend(rows: Sequence[Row]) -> str:
    present = {series_of(row) for row in rows}
    return " ".join(f'<span class="key {name}">{name}</span>' for name in SERIES if name in present)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row.get(column)))}</td>" for column in COLUMNS) + "</tr>" for row in rows
    )
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return f"<details><summary>{len(rows)} rows</summary>{table}</details>"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


_COLOURS = {  # of each series in a light and in a dark page, told apart by people with any colour vision
    "tp": ("#0067a5", "#5ab4e8"),
    "dp": ("#b97400", "#f0b43c"),
    "cp": ("#00805c", "#35c79d"),
    "dop": ("#c8440a", "#ff8148"),
    "dcp": ("#a8437e", "#e39bc6"),
    "adaptive": ("#1c2430", "#f4f6f8"),
}


def _style() -> str:
    light = "".join(f"--{name}:{pair[0]};" for name, pair in _COLOURS.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in _COLOURS.items())
    series = "".join(
        f".line.{name}{{stroke:var(--{name})}}.dot.{name},.bar.{name},.cell.{name}{{fill:var(--{name})}}"
        f".key.{name}::before{{background:var(--{name})}}"
        for name in _COLOURS
    )
    return (
        f":root{{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--rule:#dfe4ea;--page:#fff;--card:#f7f9fb;"
        f"--on:#fff;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{--ink:#e8ecf1;--soft:#9aa6b4;--rule:#2c3540;--page:#12171d;"
        f"--card:#1a2129;--on:#12171d;{dark}}}}}"
        "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:1000px;"
        "margin:2rem auto;padding:0 1rem}h1{font-size:1.6rem;margin-bottom:.3rem}h2{font-size:1.1rem;margin-top:2.2rem}"
        ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:12px}"
        "figure{margin:0;padding:10px;background:var(--card);border-radius:8px}figure:has(svg[viewBox^='0 0 9'])"
        "{grid-column:1/-1}svg{width:100%;height:auto;display:block;font:11px system-ui,sans-serif;fill:var(--ink)}"
        ".title{font-weight:600;font-size:12px}.tick,.label,.value{fill:var(--soft)}.grid{stroke:var(--rule)}"
        ".axis{stroke:var(--soft)}.line{fill:none;stroke-width:2;stroke-linejoin:round}.cell-name{fill:var(--on);"
        "font-weight:600}.cell-lead{fill:var(--on);font-size:9px}.area.waiting{fill:var(--rule)}.area.running"
        "{fill:var(--soft);opacity:.55}.line.kv{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:3 2}"
        ".chip{border-radius:9px;padding:1px 8px;font-size:12px;border:1px solid var(--soft)}.chip.measured"
        "{background:var(--ink);color:var(--page)}.key{margin-right:1em}.key::before{content:'';display:inline-block;"
        "width:.8em;height:.8em;border-radius:2px;margin-right:.4em}.wide{overflow-x:auto}table{border-collapse:collapse;"
        "font-size:12px;white-space:nowrap}td,th{padding:2px 8px;border-bottom:1px solid var(--rule);text-align:right}"
        f"footer{{margin-top:2rem;color:var(--soft);font-size:13px}}{series}"
    )


_STYLE = _style()
