"""What the rows of sweeps say about the paper's regimes, throughput, bursts and switching, for `perf.reproduction`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from perf.reproduction_facts import Finding, capacities, cost_model
from splash.core.layout import CP, DOP, DP, TP
from splash.scheduler.load import StepLoad
from splash.sweep.report import leaders, series_of
from splash.sweep.served import STRETCHES, clairvoyant_s
from splash.sweep.store import read_rows
from splash.sweep.svg import tokens

Row = dict[str, Any]
Place = tuple[float, float]  # input, batch
K = 1024
PAPER_LAYOUTS = ("tp", "dp", "cp", "dop")
CLOSE = 0.01  # leads below this share are no more than the model's grain
DEVICES = ("b200", "h200", "dcu")
NAMES = {"tp": "TP", "dp": "DP-attention", "cp": "CP", "dop": "DOP"}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a sweep that could be served."""

    rows: tuple[Row, ...]

    @classmethod
    def read(cls, path: Path) -> Rows:
        """The rows of a file; none where there is no such file."""
        return cls(tuple(row for row in read_rows(path) if row["status"] == "ok") if path.exists() else ())

    def of(self, **wanted: Any) -> list[Row]:
        """The rows that have all these values."""
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]

    def one(self, figure: str, **wanted: Any) -> float:
        """A figure of the only row that has all these values."""
        (row,) = self.of(**wanted)
        return float(row[figure])

    def rate(self, **wanted: Any) -> float:
        """Tokens a second of the only row that has all these values."""
        return self.one("tokens_per_s", **wanted)

    def leaders(self, **wanted: Any) -> dict[Place, tuple[str, float, float]]:
        """Among the paper's four layouts: see `splash.sweep.report.leaders`."""
        return leaders(row for row in self.of(**wanted) if row["layout"] in PAPER_LAYOUTS)


@dataclasses.dataclass(frozen=True)
class Regime:
    """A region in which the paper sees a layout lead.

    Attributes:
        text: the region in words.
        layout: the layout.
        holds: whether a position (input, batch) is in it.
    """

    text: str
    layout: str
    holds: Callable[[float, float], bool]


REGIMES = (
    Regime("TP at short inputs (up to 4K)", "tp", lambda length, batch: length <= 4 * K),
    Regime(
        "DP-attention in the middle (16K to 64K, 16 requests)", "dp", lambda n, b: 16 * K <= n <= 64 * K and b == 16
    ),
    Regime(
        "CP around 128K at small batch (64K to 128K, up to 4 requests)",
        "cp",
        lambda n, b: 64 * K <= n <= 128 * K and b <= 4,
    ),
    Regime("CP at 128K and 16 requests", "cp", lambda n, b: n == 128 * K and b == 16),
    Regime("DOP at 256K and beyond (16 requests)", "dop", lambda n, b: n >= 256 * K and b == 16),
    Regime("DOP at the largest batches (128 and more)", "dop", lambda n, b: b >= 128),
)


def regimes(paper: Rows) -> list[str]:
    """A line for each regime: whether it appears, and at how many of the positions that were sampled."""
    sampled = {name: paper.leaders(grid="end to end", hardware=name) for name in DEVICES}
    sampled["b200, prefill alone"] = paper.leaders(grid="prefill alone")
    lines = ["| regime | appears | leads at, of the positions sampled in it | else leads |", "|---|---|---|---|"]
    for regime in REGIMES:
        counts, won, all_, others = [], 0, 0, set()
        for name, found in sampled.items():
            asked = [leader for place, leader in found.items() if regime.holds(*place)]
            here = sum(leader == regime.layout for leader, _, _ in asked)
            others |= {leader for leader, _, _ in asked} - {regime.layout}
            won, all_ = won + here, all_ + len(asked)
            if asked:
                counts.append(f"{name} {here} of {len(asked)}")
        verdict = "yes" if won == all_ else "in part" if won else "**no**"
        rest = ", ".join(NAMES[name] for name in PAPER_LAYOUTS if name in others)
        lines.append(f"| {regime.text} | {verdict} | {', '.join(counts)} | {rest} |")
    found = {finding.statement: finding.value for finding in capacities()}
    for text, name, stated in (("B200", "b200_over_dp", 27.3), ("DCU", "dcu_over_dp", 19.0)):
        what = f"DOP over DP-attention in capacity by about {stated:.0f} % on {text}"
        lines.append(f"| {what} | {_verdict(found[name] / stated)} | {found[name]:.1f} %, computed | |")
    burst = {row["layout"]: row["tokens_per_s"] for row in paper.of(grid="burst", hardware="dcu", batch=32)}
    ratio = burst["dop"] / burst["dp"]
    what = "DCU burst of 32 x 240K: DOP over DP-attention about 1.3x"
    lines.append(f"| {what} | {_verdict((ratio - 1) / 0.322)} | {ratio:.2f}x | |")
    return lines


def _verdict(reached: float) -> str:
    """Of an effect of which this share was reached."""
    return "yes" if reached >= 0.75 else "in part" if reached >= 0.25 else "**no**"


def throughput(paper: Rows) -> list[Finding]:
    """Figures of the end-to-end sweeps."""

    def rates(hardware: str, lengths: Iterable[int]) -> list[float]:
        return [paper.rate(grid="end to end", hardware=hardware, layout="dop", batch=16, input=n * K) for n in lengths]

    def over(hardware: str, length: int, batch: int, other: str = "cp") -> float:
        wanted = {"grid": "end to end", "hardware": hardware, "batch": batch, "input": length * K}
        return (paper.rate(layout="dop", **wanted) / paper.rate(layout=other, **wanted) - 1) * 100

    def spread(values: Iterable[float]) -> tuple[float, float]:
        values = list(values)
        return min(values), max(values)

    b200, h200, dcu = (256, 384, 512), (64, 128, 256), (256, 512)
    large = {"grid": "end to end", "hardware": "b200", "batch": 256, "input": 128 * K}
    behind = [-over("dcu", length, batch, "dp") for length in (32, 64) for batch in (8, 16, 32)]
    return [
        Finding("b200_dop_rate", spread(rates("b200", b200)), "256K, 384K, 512K"),
        Finding("b200_dop_lead", spread(over("b200", n, 16) for n in b200), "behind, and less so the longer the input"),
        Finding("b200_large_dop", paper.rate(layout="dop", **large)),
        Finding("b200_large_cp", paper.rate(layout="cp", **large)),
        Finding("b200_behind_1", -over("b200", 128, 1)),
        Finding("b200_behind_4", -over("b200", 128, 4)),
        Finding("h200_dop_rate", spread(rates("h200", h200)), "64K, 128K, 256K"),
        Finding("h200_dop_lead", spread(over("h200", n, 16) for n in h200)),
        Finding("dcu_dop_rate", spread(rates("dcu", dcu)), "the stand-in"),
        Finding("dcu_dop_lead", spread(over("dcu", n, 16) for n in dcu), "the stand-in"),
        Finding("dcu_behind", spread(behind), "the stand-in"),
    ]


def leaders_table(paper: Rows) -> list[str]:
    """The leading layout by input length and by batch."""
    lines = [f"Leaders among the paper's four layouts, and their leads; below {CLOSE:.0%} is the model's grain.\n"]
    for name in DEVICES:
        found = paper.leaders(grid="end to end", hardware=name)
        by_input = sorted(place for place in found if place[1] == 16)
        lines.append(f"- {name}, 16 requests, by input: {_leads(found, by_input, lambda place: tokens(place[0]))}.")
        for length in sorted({n for n, b in found if b != 16}):
            by_batch = sorted(place for place in found if place[0] == length)
            leads = _leads(found, by_batch, lambda place: f"{place[1]:g}")
            lines.append(f"- {name}, {tokens(length)} in, by batch: {leads}.")
    alone = paper.leaders(grid="prefill alone")
    for batch in sorted({b for _, b in alone}):
        places = sorted(place for place in alone if place[1] == batch)
        leads = _leads(alone, places, lambda place: tokens(place[0]))
        lines.append(f"- b200, prefill alone, {batch:g} request{'s' if batch > 1 else ''}, by input: {leads}.")
    return lines


def _leads(found: dict[Place, tuple[str, float, float]], places: list[Place], text: Callable[[Place], str]) -> str:
    return ", ".join(f"{text(place)} {NAMES[found[place][0]]} +{found[place][2]:.1%}" for place in places)


def why(paper: Rows) -> list[str]:
    """Stage by stage, what a prefill step of DOP has that the others do not, and what would change it."""
    model = cost_model("model=glm_5", "hardware=b200")
    lines = [
        "Milliseconds of one step of 8,192 prefill tokens, GLM-5 on 8 B200, by the cost model. Owners "
        "compute 1,024 each.\n",
        "| history | layout | step | attention | exchange | reduction | projections, movement | rest, less overlap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    halved = {}
    for start in (16 * K, 256 * K, 512 * K):
        whole, shared = StepLoad.prefill(1, 8192, start, 8), StepLoad.prefill(8, 1024, start, 8)
        for layout, load in ((TP, whole), (DP, shared), (CP, whole), (DOP, shared)):
            cost = model.step(layout, load)
            ms = {stage: seconds * 1e3 for stage, seconds in cost.stages.items()}
            shown = (ms["attention"], ms["exchange"], ms["reduction"], ms["projections"] + ms["movement"])
            cells = [cost.seconds * 1e3, *shown, cost.seconds * 1e3 - sum(shown)]
            lines.append(f"| {tokens(start)} | {layout} | " + " | ".join(f"{cell:,.1f}" for cell in cells) + " |")
            halved[start, layout] = (cost.seconds * 1e3, ms["reduction"] / 2)
    dop, saved = halved[512 * K, DOP]
    cp = halved[512 * K, CP][0]
    dp = halved[512 * K, DP][0]
    budgets = sorted({row["chunk"] for row in paper.of(grid="chunk budget")})
    changed = [leader for chunk in budgets for leader, _, _ in paper.leaders(grid="chunk budget", chunk=chunk).values()]
    overlapped = [leader for leader, _, _ in paper.leaders(grid="all communication overlapped").values()]
    return [
        *lines,
        "",
        "- DOP pays twice what split rows pay at the ends of a layer (all-reduces against an all-gather and a "
        "reduce-scatter), and two exchanges of rows with all heads. Both depend on the rows of a step, not "
        "on the history. "
        "CP gathers the history, so its exchange grows with the input and DOP closes in on it, as in the "
        "paper; at 512K it "
        f"takes {dop:.0f} ms against {cp:.0f}.",
        "- With sums formed inside the switch (NVLink SHARP) an all-reduce would take what a reduce-scatter "
        "takes, and DOP "
        f"{dop - saved:.0f} ms at 512K. The paper's B200 hosts have such switches. We have not measured them, so the "
        "figures assume none.",
        f"- DP-attention moves no history at all ({dp:.0f} ms at 512K), so at equal load of the ranks "
        "nothing passes it. What "
        "holds it back at 128K and beyond the text that we have does not say. Uneven ranks would: with "
        "fewer requests than "
        "ranks, CP leads it here as well.",
        "- A prefill-only group is not held back by KV memory: one prompt a rank keeps it busy, so DOP's "
        "larger pool changes "
        "nothing there. It does where requests stay to decode; see the bursts below.",
        f"- Other chunk budgets ({', '.join(f'{chunk:,}' for chunk in budgets)} tokens): {_tally(changed)}. With "
        f"communication hidden behind attention as far as it reaches: {_tally(overlapped)}.",
        "- TP computes the indexer and reads each row's 2,048 keys on every rank, which is most of its time "
        "from 16K on. The "
        "model charges those reads to memory; a cache that holds a short history would serve them, which speaks for TP "
        "at short inputs and is not modelled.",
        "- At 1K to 4K and 16 requests, 1,024 decode steps are nearly all of the time: the four layouts are within "
        f"{_range(paper):.1%} of each other.",
    ]  # fmt: skip


def _tally(leading: list[str]) -> str:
    """At how many positions each layout leads."""
    counts = [(name, leading.count(name)) for name in PAPER_LAYOUTS if name in leading]
    return ", ".join(f"{NAMES[name]} leads at {count} of {len(leading)} positions" for name, count in counts)


def _range(paper: Rows) -> float:
    """How far apart the four layouts are at 1K to 4K, a share."""
    apart = []
    for length in (1, 2, 4):
        rows = paper.of(grid="end to end", hardware="b200", batch=16, input=length * K)
        rates = [row["tokens_per_s"] for row in rows if row["layout"] in PAPER_LAYOUTS]
        apart.append(max(rates) / min(rates) - 1)
    return max(apart)


def bursts(paper: Rows) -> list[Finding]:
    """The DCU burst."""
    wanted = {"grid": "burst", "hardware": "dcu", "batch": 32}
    dop, dp = ({figure: paper.one(figure, layout=name, **wanted) for figure in _BURST} for name in ("dop", "dp"))
    return [
        Finding("dcu_burst", dop["tokens_per_s"] / dp["tokens_per_s"], "the stand-in"),
        Finding("dcu_burst_dop", dop["input_tokens_per_s"], f"{dop['peak_running']:.0f} requests at once"),
        Finding("dcu_burst_dp", dp["input_tokens_per_s"], f"{dp['peak_running']:.0f} requests at once"),
        Finding("dcu_burst_mean_dop", dop["completion_mean_s"]),
        Finding("dcu_burst_mean_dp", dp["completion_mean_s"]),
    ]


_BURST = ("tokens_per_s", "input_tokens_per_s", "peak_running", "completion_mean_s")


def bursts_table(paper: Rows) -> list[str]:
    """DOP over DP-attention in all bursts."""
    lines = ["| hardware | burst | DOP over DP-attention | at once, DOP | DP-attention |", "|---|---|---|---|---|"]
    for row in paper.of(grid="burst", layout="dop"):
        (other,) = paper.of(**{name: row[name] for name in ("grid", "hardware", "input", "batch")}, layout="dp")
        ratio = row["tokens_per_s"] / other["tokens_per_s"]
        burst = f"{row['batch']} x {tokens(row['input'])}"
        most = f"{row['peak_running']} | {other['peak_running']}"
        lines.append(f"| {row['hardware']} | {burst} | {ratio:.3f}x | {most} |")
    return [*lines, "", _serial(paper)]


def _serial(paper: Rows) -> str:
    """Why admission is not all that decides the bursts, with the figures that show it."""
    eight = {name: paper.rate(grid="burst", batch=8, hardware="dcu", layout=name) for name in ("dop", "dp", "cp")}
    rates = ", ".join(f"{rate:,.0f} tokens/s in {NAMES[name]}" for name, rate in eight.items())
    return (
        "DOP admits what the paper says it admits. But prefill is nearly all of the time of such a burst, and there "
        f"memory decides nothing: a burst of 8, which fits in every layout, runs at {rates} on DCU. What DOP gains is "
        "a wave of decodes less, and what its prefill takes longer, as the table of stages above shows, is more than "
        "that wherever it is behind."
    )


def adaptive(policies: Rows, stated: list[float]) -> list[str]:
    """Following the best layout against each fixed one."""
    if not policies.rows:
        return ["Not simulated yet: `python -m splash.sweep sweep=policies out=docs/sweeps/policies`."]
    lines = [
        f"The paper: {stated[0]} to {stated[1]} times each fixed layout, on B200. Tokens a second of the adaptive "
        "policy over those of each fixed layout. The last column is what there is to gain over the best of them, by "
        f"serving every {STRETCHES}th of the work in the layout that was fastest over it, with switches for free; "
        "layouts serve requests in another order, so it is no strict bound.\n",
        "| hardware | workload | "
        + " | ".join((*PAPER_LAYOUTS, "dcp"))
        + " | over the best fixed | switches | a clairvoyant over it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    places = dict.fromkeys((row["hardware"], row["grid"]) for row in policies.rows)
    all_gained, all_most = [], []
    for hardware, grid in places:
        rows = {series_of(row): row for row in policies.of(hardware=hardware, grid=grid)}
        own = rows.pop("adaptive", None)
        if own is None:
            continue
        cells = [
            f"{own['tokens_per_s'] / rows[name]['tokens_per_s']:.2f}" if name in rows else "does not fit"
            for name in (*PAPER_LAYOUTS, "dcp")
        ]
        fastest = min(row["seconds"] for row in rows.values())
        gained, most = fastest / own["seconds"], fastest / clairvoyant_s([row["served_s"] for row in rows.values()])
        all_gained.append(gained)
        all_most.append(most)
        lines.append(
            f"| {hardware} | {grid} | {' | '.join(cells)} | **{gained:.3f}** | {own['switches']} | {most:.3f} |"
        )
    ahead, most = sum(gained >= 1.0005 for gained in all_gained), max(all_most)
    reach = f"{stated[0]} times each of them is {'out of' if most < stated[0] else 'within'} reach here"
    lines.append(
        f"\nAhead of every fixed layout in {ahead} of {len(all_gained)}, at the least {min(all_gained):.3f} and at the "
        f"most {max(all_gained):.2f} times the best. The clairvoyant has {most:.2f} at the most: {reach}. One kind of "
        "load has one layout that is best for nearly all of it; what is to be gained is by not having to know which, "
        "and where several kinds follow one another."
    )
    return lines
