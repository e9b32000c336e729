"""The four kinds of chart of a report: lines, bars, a heatmap of leaders, a time line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splash.sweep.svg import Picture, Scale, round_ticks, short, tokens

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 460.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 30.0, 40.0


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points], basis: Mapping[str, str]) -> str:
    """Lines over a logarithmic x axis of token or request counts, y from 0.

    Args:
        title, x_label, y_label: texts.
        series: points by name, in order of x; a name is also the CSS class that colours it.
        basis: by name, "measured" or "simulated", for what shows when a point is pointed at.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    ticks = round_ticks(max(y for points in series.values() for _, y in points))
    across = Scale(xs[0], xs[-1], LEFT + 14, WIDTH - RIGHT - 14, log=xs[0] > 0)
    up = Scale(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    picture = Picture(WIDTH, HEIGHT, title)
    _frame(picture, title, y_label, ticks, up)
    shown = xs if len(xs) <= 10 else xs[:: -(-len(xs) // 10)]
    for x in shown:
        picture.line(across(x), HEIGHT - BOTTOM, across(x), HEIGHT - BOTTOM + 4, "axis")
        picture.text(across(x), HEIGHT - BOTTOM + 16, tokens(x), "tick", "middle")
    picture.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "label", "middle")
    for name, points in series.items():
        places = [(across(x), up(y)) for x, y in points]
        picture.path(places, f"line {name}")
        for (x, y), (px, py) in zip(points, places, strict=True):
            picture.dot(px, py, f"dot {name}", f"{name}, {tokens(x)}: {short(y)} ({basis[name]})")
    return str(picture)


def bar_chart(title: str, unit: str, bars: Mapping[str, float], notes: Mapping[str, str]) -> str:
    """Horizontal bars from 0.

    Args:
        title: text.
        unit: of the values.
        bars: values by name; a name is also the CSS class that colours it.
        notes: by name, what stands behind the value.
    """
    height = 44.0 + 30.0 * len(bars)
    picture = Picture(WIDTH, height, title)
    picture.text(LEFT - 40, 18, title, "title")
    along = Scale(0, max(*bars.values(), 1e-12), LEFT + 20, WIDTH - 150)
    for number, (name, value) in enumerate(bars.items()):
        top = 34.0 + 30.0 * number
        picture.text(LEFT + 12, top + 14, name, "tick", "end")
        picture.rect(LEFT + 20, top, along(value) - LEFT - 20, 20, f"bar {name}", f"{name}: {value:,.6g} {unit}", 2)
        picture.text(along(value) + 6, top + 14, f"{short(value)} {unit} {notes.get(name, '')}".rstrip(), "value")
    return str(picture)


def leader_map(title: str, leaders: Mapping[tuple[float, float], tuple[str, float, float]]) -> str:
    """Which layout leads where: input length across, batch up.

    Args:
        title: text.
        leaders: by (input, batch), the leading layout, its tokens a second, and by how much it leads the next, a share.
    """
    inputs = sorted({x for x, _ in leaders})
    batches = sorted({y for _, y in leaders})
    side = max(40.0, min(58.0, (2 * WIDTH - LEFT) / len(inputs)))
    width, height = LEFT + side * len(inputs) + RIGHT, TOP + 34.0 * len(batches) + BOTTOM
    picture = Picture(width, height, title)
    picture.text(LEFT - 40, 18, title, "title")
    for column, x in enumerate(inputs):
        picture.text(LEFT + side * (column + 0.5), height - BOTTOM + 16, tokens(x), "tick", "middle")
        for row, y in enumerate(reversed(batches)):
            if (found := leaders.get((x, y))) is None:
                continue
            name, rate, lead = found
            left, top = LEFT + side * column, TOP + 34.0 * row
            tip = f"{tokens(x)} x {y:g}: {name}, {short(rate)} tokens/s, {lead:.1%} before the next"
            picture.rect(left + 1, top + 1, side - 2, 32, f"cell {name}", tip, 3)
            picture.text(left + side / 2, top + 15, name, "cell-name", "middle")
            picture.text(left + side / 2, top + 27, f"+{lead:.0%}" if lead < 10 else ">10x", "cell-lead", "middle")
    for row, y in enumerate(reversed(batches)):
        picture.text(LEFT - 6, TOP + 34.0 * row + 21, f"{y:g}", "tick", "end")
    picture.text(LEFT + side * len(inputs) / 2, height - 6, "input, tokens", "label", "middle")
    picture.text(12, TOP + 17.0 * len(batches), "batch", "label", "middle", turned=True)
    return str(picture)


def time_line(title: str, samples: Sequence[Sequence[Any]]) -> str:
    """Load, memory and layout over time.

    Args:
        title: text.
        samples: rows of `splash.sweep.outcome.TIMELINE`.
    """
    width, floor = 2 * WIDTH, HEIGHT - BOTTOM - 22
    end = float(samples[-1][0])
    across = Scale(0, end or 1.0, LEFT, width - 40)
    ticks = round_ticks(max(running + waiting for _, _, running, waiting, _ in samples))
    up, share = Scale(0, ticks[-1], floor, TOP), Scale(0, 1, floor, TOP)
    picture = Picture(width, HEIGHT, title)
    picture.text(LEFT - 40, 18, title, "title")
    for tick in ticks:
        picture.line(LEFT, up(tick), width - 40, up(tick), "grid")
        picture.text(LEFT - 6, up(tick) + 4, short(tick), "tick", "end")
    for tick in (0.0, 0.5, 1.0):
        picture.text(width - 34, share(tick) + 4, f"{tick:.0%}", "tick")
    waiting = [(across(t), up(running + queued)) for t, _, running, queued, _ in samples]
    picture.path(waiting, "area waiting", floor)
    picture.path([(across(t), up(running)) for t, _, running, _, _ in samples], "area running", floor)
    picture.path([(across(t), share(used)) for t, _, _, _, used in samples], "line kv")
    began = 0
    for number in range(1, len(samples) + 1):
        if number < len(samples) and samples[number][1] == samples[began][1]:
            continue
        start, layout = float(samples[began][0]) if began else 0.0, samples[began][1]
        stop = float(samples[number][0]) if number < len(samples) else end
        tip = f"{layout}, {start:,.1f} to {stop:,.1f} s"
        picture.rect(across(start), floor + 6, across(stop) - across(start), 14, f"bar {layout}", tip)
        if across(stop) - across(start) > 28:
            picture.text((across(start) + across(stop)) / 2, floor + 17, layout, "cell-name", "middle")
        began = number
    for tick in round_ticks(end, 8):
        if tick <= end:
            picture.text(across(tick), HEIGHT - BOTTOM + 16, short(tick), "tick", "middle")
    axes = "seconds; requests running and waiting (left), fullest rank's pages (right)"
    picture.text(LEFT + 4, HEIGHT - 6, axes, "label")
    return str(picture)


def _frame(picture: Picture, title: str, y_label: str, ticks: Sequence[float], up: Scale) -> None:
    picture.text(LEFT - 40, 18, title, "title")
    picture.text(12, (TOP + HEIGHT - BOTTOM) / 2, y_label, "label", "middle", turned=True)
    for tick in ticks:
        picture.line(LEFT, up(tick), WIDTH - RIGHT, up(tick), "grid")
        picture.text(LEFT - 6, up(tick) + 4, short(tick), "tick", "end")
