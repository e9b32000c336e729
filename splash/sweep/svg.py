"""A small drawing kit: an SVG picture as text, scales, round ticks. Colours are CSS classes, which the page defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


class Picture:
    """An SVG picture of a size, for a page of HTML.

    Coordinates are in pixels from the upper left corner; it scales with the page.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self._parts = [
            f'<svg viewBox="0 0 {_n(width)} {_n(height)}" style="max-width:{_n(width)}px" role="img" '
            f'aria-label="{escape(label)}">'
        ]

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self._parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{css}"/>')

    def path(self, points: Sequence[tuple[float, float]], css: str, floor: float | None = None) -> None:
        """A line through points; with `floor`, the area between it and that height."""
        if not points:
            return
        text = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        if floor is not None:
            text += f"L{_n(points[-1][0])} {_n(floor)}L{_n(points[0][0])} {_n(floor)}Z"
        self._parts.append(f'<path d="{text}" class="{css}"/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, tip: str = "", radius: float = 0) -> None:
        """A rectangle, with what shows when it is pointed at."""
        round_ = f' rx="{_n(radius)}"' if radius else ""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}"{round_} '
            f'class="{css}">{_title(tip)}</rect>'
        )

    def dot(self, x: float, y: float, css: str, tip: str = "", radius: float = 3.2) -> None:
        """A filled circle."""
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{css}">{_title(tip)}</circle>')

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start", turned: bool = False) -> None:
        """A line of text; `turned` runs it upwards."""
        turn = f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turned else ""
        names = f' class="{css}"' if css else ""
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{names}{turn}>{escape(text)}</text>')

    def __str__(self) -> str:
        return "".join(self._parts) + "</svg>"


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `end`, evenly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.start + share * (self.end - self.start)


def round_ticks(high: float, count: int = 5) -> list[float]:
    """Ticks from 0 to at least `high` in steps of 1, 2, 2.5 or 5 times a power of ten, about `count` of them."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * number for number in range(math.ceil(high / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis or a label: 950, 1.2k, 34M."""
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound * 0.9995:
            return f"{value / bound:.3g}{unit}"
    return f"{value:.3g}"


def tokens(value: float) -> str:
    """A number of tokens in binary thousands where it is a multiple: 512, 4K, 1M."""
    for bound, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= bound and value % (bound // 4) == 0:
            return f"{value / bound:g}{unit}"
    return f"{value:,.0f}"


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _title(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""
