"""Small multiples as SVG: waits over time and shares of tokens over time, a panel per policy, one scale for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Final

from benchmarks.scheduling.figures import LONG_S

Row = dict[str, Any]

WIDTH: Final = 1180
_LEFT, _GAP, _TOP, _HEIGHT, _BOTTOM = 52, 30, 40, 190, 44
_BINS: Final = 60
"""Into how many parts of equal length the arrivals of a run are put."""


@dataclass(frozen=True)
class Panel:
    """One policy's run: its name, a line of figures under it, and what became of each request."""

    name: str
    facts: str
    results: Sequence[Row]


@dataclass(frozen=True)
class Frame:
    """Where a panel lies, and its scales."""

    left: float
    top: float
    width: float
    until: float
    highest: float

    def x(self, seconds: float) -> float:
        return round(self.left + self.width * min(seconds, self.until) / self.until, 1)

    def y(self, value: float) -> float:
        return round(self.top + _HEIGHT * (1 - value / self.highest), 1)


def groups_of(panels: Sequence[Panel]) -> list[str]:
    """The classes or tenants of a workload; those that begin early first where they have no order of their own."""
    first: dict[str, float] = {}
    for each in panels[0].results:
        first.setdefault(each["group"], each["at"])
    return sorted(first) if classed(panels) else list(first)


def classed(panels: Sequence[Panel]) -> bool:
    """Whether the groups are classes; else they are tenants."""
    return all(each["group"] == f"P{each['priority']}" for each in panels[0].results)


def waits(panels: Sequence[Panel]) -> str:
    """The wait by the time of arrival: a line per group, the longest as a grey area, 30 s as a dashed line."""
    until = math.ceil(max(each["at"] for panel in panels for each in panel.results))
    longest = max((each["queue_s"] or 0.0) for panel in panels for each in panel.results)
    names = groups_of(panels)

    def inside(panel: Panel, frame: Frame) -> Iterator[str]:
        yield from _envelope(panel.results, frame)
        if 1.2 * longest >= LONG_S:
            y = frame.y(LONG_S)
            yield f'<line class="limit" x1="{frame.left}" x2="{frame.left + frame.width}" y1="{y}" y2="{y}"/>'
        for index, name in reversed(list(enumerate(names))):
            yield from _line([each for each in panel.results if each["group"] == name], frame, index, name)
        for each in panel.results:
            if each["state"] != "done":
                x = frame.x(each["at"])
                index = names.index(each["group"])
                yield f'<line class="away s{index}" x1="{x}" x2="{x}" y1="{frame.top}" y2="{frame.top + 7}"/>'

    return _figure(panels, until, max(1.2 * longest, 1.0), "wait until the first step, s", "arrival, s", inside)


def shares(panels: Sequence[Panel]) -> str:
    """The share of each group in the tokens of answers, stacked, over time."""
    until = math.ceil(max(each["at"] for panel in panels for each in panel.results))
    names = groups_of(panels)

    def inside(panel: Panel, frame: Frame) -> Iterator[str]:
        served = [_tokens([each for each in panel.results if each["group"] == name], until) for name in names]
        totals = [sum(column) or 1.0 for column in zip(*served, strict=True)]
        below = [0.0] * _BINS
        for index, name in enumerate(names):
            above = [low + 100 * part / all_ for low, part, all_ in zip(below, served[index], totals, strict=True)]
            edge = [f"{_middle(number, frame)},{frame.y(high)}" for number, high in enumerate(above)]
            back = [f"{_middle(number, frame)},{frame.y(low)}" for number, low in reversed(list(enumerate(below)))]
            yield f'<polygon class="f{index}" points="{" ".join(edge + back)}"><title>{escape(name)}</title></polygon>'
            below = above

    return _figure(panels, until, 100.0, "share of the tokens of answers, %", "time, s", inside)


def legend(names: Sequence[str], others: Sequence[tuple[str, str]] = ()) -> str:
    """A line of names with their colours; others by the class of their mark."""
    marks = [(f"k{index}", name) for index, name in enumerate(names)]
    return (
        "<p class=legend>"
        + "".join(f'<span><i class="{mark}"></i>{escape(name)}</span>' for mark, name in [*marks, *others])
        + "</p>"
    )


def ticks(highest: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to a highest value, at most so many."""
    rough = highest / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * number for number in range(int(highest / step + 1e-9) + 1)]


def _figure(
    panels: Sequence[Panel],
    until: float,
    highest: float,
    upward: str,
    along: str,
    inside: Callable[[Panel, Frame], Iterator[str]],
) -> str:
    """All panels: in a row where they fit, else in rows of three."""
    columns = len(panels) if len(panels) <= 4 else 3
    rows = -(-len(panels) // columns)
    width = (WIDTH - _LEFT - _GAP * columns) / columns
    full = _TOP + _HEIGHT + _BOTTOM
    parts = [f'<svg viewBox="0 0 {WIDTH} {rows * full}" role="img" aria-label="{escape(upward)}">']
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        left = round(_LEFT + column * (width + _GAP), 1)
        frame = Frame(left, row * full + _TOP, round(width, 1), until, highest)
        parts += [*_head(panel, frame), *_grid(frame, along, numbered=column == 0), *inside(panel, frame)]
        if column == 0:
            x, y = 12, frame.top + _HEIGHT / 2
            parts.append(f'<text class="axis" text-anchor="middle" transform="translate({x},{y}) rotate(-90)">{upward}')
            parts.append("</text>")
    return "".join([*parts, "</svg>"])


def _head(panel: Panel, frame: Frame) -> Iterator[str]:
    yield f'<text class="name" x="{frame.left}" y="{frame.top - 23}">{escape(panel.name)}</text>'
    yield f'<text class="facts" x="{frame.left}" y="{frame.top - 8}">{escape(panel.facts)}</text>'


def _grid(frame: Frame, along: str, *, numbered: bool) -> Iterator[str]:
    right, bottom = frame.left + frame.width, frame.top + _HEIGHT
    for value in ticks(frame.highest):
        y = frame.y(value)
        yield f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{y}" y2="{y}"/>'
        if numbered:
            yield f'<text text-anchor="end" x="{frame.left - 6}" y="{y + 4}">{value:g}</text>'
    for value in ticks(frame.until, 5):
        x = frame.x(value)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>'
        yield f'<text text-anchor="middle" x="{x}" y="{bottom + 17}">{value:g}</text>'
    yield f'<text class="axis" text-anchor="middle" x="{frame.left + frame.width / 2}" y="{bottom + 33}">{along}</text>'


def _envelope(results: Sequence[Row], frame: Frame) -> Iterator[str]:
    bins = _binned(results, frame.until)
    points = [f"{_middle(number, frame)},{frame.y(max(bins[number]))}" for number in sorted(bins)]
    if points:
        ends = (_middle(min(bins), frame), _middle(max(bins), frame))
        floor = [f"{ends[1]},{frame.y(0)}", f"{ends[0]},{frame.y(0)}"]
        yield f'<polygon class="longest" points="{" ".join(points + floor)}"/>'


def _line(results: Sequence[Row], frame: Frame, index: int, name: str) -> Iterator[str]:
    bins = _binned(results, frame.until)
    if not bins:
        return
    words = []
    for before, number in pairwise([-2, *sorted(bins)]):
        mean = sum(bins[number]) / len(bins[number])
        words.append(f"{'L' if number - before <= 2 and words else 'M'}{_middle(number, frame)},{frame.y(mean)}")
    yield f'<path class="line s{index}" d="{"".join(words)}"><title>{escape(name)}</title></path>'


def _binned(results: Sequence[Row], until: float) -> dict[int, list[float]]:
    bins: dict[int, list[float]] = {}
    for each in results:
        if each["queue_s"] is not None:
            bins.setdefault(min(int(each["at"] / until * _BINS), _BINS - 1), []).append(each["queue_s"])
    return bins


def _tokens(results: Sequence[Row], until: float) -> list[float]:
    """Tokens per bin; those of a request come evenly from its first token to its last."""
    found, width = [0.0] * _BINS, until / _BINS
    for each in results:
        first, last = each["first_token_at"], each["finished_at"]
        if first is None or last is None or first >= until:
            continue
        for number in range(int(first / width), min(int(last / width), _BINS - 1) + 1):
            part = min(last, (number + 1) * width) - max(first, number * width)
            found[number] += each["output_tokens"] * (part / (last - first) if last > first else 1.0)
    return found


def _middle(number: int, frame: Frame) -> float:
    return frame.x((number + 0.5) / _BINS * frame.until)
