"""The picture of a record: perplexity against the tokens that a query sees, a line for each kind of policy.

Static SVG in the colours of the audit's pictures, for light and for dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.sax.saxutils import escape

from vllm_graft.audit.render.presentation import variables

Row = dict[str, Any]

WIDTH: Final = 760
HEIGHT: Final = 384
TOP: Final = 118
FLOOR: Final = 330
TONES: Final = ("bad", "news", "ok", "idle", "none")
"""The colours of the lines, in the order of the record."""
NEAR: Final = 1.5
"""How many times the perplexity of full attention a line may reach to be drawn enlarged."""
TOKEN_TICKS: Final = (256, 512, 1024, 2048)

STYLE: Final = """
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:var(--ink)}
.t{font:13px system-ui,-apple-system,"Segoe UI",sans-serif}.s{fill:var(--soft)}.m{text-anchor:middle}.e{text-anchor:end}
.paper{fill:var(--paper)}.axis{stroke:var(--soft);stroke-width:1}.grid{stroke:var(--line);stroke-width:1}
.limit{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3}.curve{fill:none;stroke-width:2}
""" + "".join(f".{tone}{{stroke:var(--{tone})}}.{tone}-dot{{fill:var(--{tone})}}" for tone in TONES)


@dataclass(frozen=True)
class Panel:
    """Where a chart lies, and the values at the edges of its logarithmic scales."""

    left: float
    right: float
    tokens: tuple[float, float]
    perplexity: tuple[float, float]

    def x(self, tokens: float) -> float:
        return _place(tokens, self.tokens, self.left, self.right)

    def y(self, perplexity: float) -> float:
        return _place(perplexity, self.perplexity, FLOOR, TOP)


def _place(value: float, edges: tuple[float, float], start: float, end: float) -> float:
    low, high = (math.log(edge) for edge in edges)
    return round(start + (math.log(value) - low) / (high - low) * (end - start), 1)


@dataclass(frozen=True)
class Line:
    """The rows of one kind of policy, by the tokens seen."""

    name: str
    tone: str
    rows: list[Row]

    @property
    def highest(self) -> float:
        return max(row["perplexity"] for row in self.rows)


def draw(record: Row) -> str:
    """Draw all policies on the left, and on the right, larger, those that are near full attention."""
    full, lines = record["rows"][0]["perplexity"], _lines(record)
    near = [line for line in lines if line.highest < NEAR * full]
    seen = [row["seen"] for line in lines for row in line.rows]
    tokens = (min(seen) * 0.9, max(seen) * 1.1)
    wide = Panel(56, 366, tokens, (full * 0.9, max(line.highest for line in lines) * 1.1))
    close = Panel(436, 744, tokens, (full * 0.99, max(line.highest for line in near) * 1.01))
    title = f"perplexity of {record['model']} by the tokens that a query sees, both logarithmic"
    body = [
        f'<text class="t" x="16" y="26">{escape(title)}</text>',
        *_legend(lines),
        *_chart(wide, "all policies", full, lines),
        *_chart(close, "those near full attention, enlarged", full, near),
    ]
    name = "Perplexity against the tokens that a query sees, a line for each kind of policy"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img">\n<title>{name}</title>\n<style>{variables("svg")}{STYLE}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _lines(record: Row) -> list[Line]:
    families: dict[str, list[Row]] = {}
    for row in record["rows"][1:]:
        families.setdefault(row["family"], []).append(row)
    return [
        Line(name, tone, sorted(rows, key=lambda row: row["seen"]))
        for (name, rows), tone in zip(families.items(), TONES, strict=True)
    ]


def _legend(lines: Sequence[Line]) -> list[str]:
    pieces = []
    entries = [*((line.name, f"curve {line.tone}") for line in lines), ("full attention", "limit")]
    for number, (name, style) in enumerate(entries):
        x, y = 16 + number % 3 * 240, 52 + number // 3 * 20
        pieces.append(f'<line class="{style}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>')
        pieces.append(f'<text x="{x + 30}" y="{y}">{escape(name)}</text>')
    return pieces


def _chart(panel: Panel, name: str, full: float, lines: Sequence[Line]) -> list[str]:
    left, right = panel.left, panel.right
    pieces = [f'<text class="s" x="{left}" y="{TOP - 12}">{escape(name)}</text>']
    for tick in _ticks(*panel.perplexity):
        y = panel.y(tick)
        pieces.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        pieces.append(f'<text class="s e" x="{left - 6}" y="{y + 4:.1f}">{tick:g}</text>')
    for tick in TOKEN_TICKS:
        pieces.append(f'<text class="s m" x="{panel.x(tick)}" y="{FLOOR + 18}">{tick:,}</text>')
    pieces.append(f'<text class="s m" x="{(left + right) / 2}" y="{FLOOR + 38}">tokens seen</text>')
    pieces.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{FLOOR}" y2="{FLOOR}"/>')
    y = panel.y(full)
    pieces.append(f'<line class="limit" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
    for line in lines:
        points = [(panel.x(row["seen"]), panel.y(row["perplexity"])) for row in line.rows]
        path = " ".join(f"{x},{y}" for x, y in points)
        pieces.append(f'<polyline class="curve {line.tone}" points="{path}"/>')
        pieces += [f'<circle class="{line.tone}-dot" cx="{x}" cy="{y}" r="3.5"/>' for x, y in points]
    return pieces


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers: 1, 2 and 5 with their tens over a wide range, else equal steps."""
    if high > 4 * low:
        return [factor * 10**power for power in range(5) for factor in (1, 2, 5) if low < factor * 10**power < high]
    step = next(step for step in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / step < 8)
    return [round(number * step, 2) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
