"""The runs as one plain page, no script: waits and shares over time, the rows, the goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, Final

from benchmarks.scheduling.figures import LONG_S
from benchmarks.scheduling.plots import Panel, classed, groups_of, legend, shares, waits
from benchmarks.scheduling.workloads import DEVICE, ENGINE, WORKLOADS

_LIGHT: Final = ("#d55e00", "#e69f00", "#009e73", "#3ba3dc", "#8a4fb5")
_DARK: Final = ("#ff7f3f", "#f2b632", "#24c79a", "#6cc4f5", "#c08fe8")
"""Colours that the colour-blind can tell apart, from the first class to the last; further groups begin again."""

_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; --soft: #8888; --area: #8883 }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .3rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem } p { margin: .3rem 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .87rem }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #8884 }
th.l, td.l { text-align: left } th { font-weight: 600 }
.good { color: #1a7f37 } .bad { color: #cf222e } .soft { opacity: .75 }
svg { width: 100%; height: auto; display: block; margin-top: .4rem }
svg text { fill: currentColor; font-size: 12px } svg .name { font-size: 14px; font-weight: 600 }
svg .facts, svg .axis { opacity: .75 }
.grid { stroke: var(--soft); stroke-width: .6 } .longest { fill: var(--area) }
.limit { stroke: currentColor; stroke-width: 1.2; stroke-dasharray: 5 4 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .away { stroke-width: 1; opacity: .6 }
.legend span { display: inline-block; margin-right: 1.3rem }
.legend i { display: inline-block; width: 1.5rem; height: .28rem; margin-right: .45rem; vertical-align: middle }
.legend i.area { background: var(--area); height: .8rem }
.legend i.dash { background: none; border-top: 2px dashed; height: 0 }
.legend i.tick { width: 2px; height: .8rem; background: currentColor; opacity: .6 }
""".strip()


@dataclass(frozen=True)
class Run:
    """One run: its row, and what became of each request."""

    row: dict[str, Any]
    results: list[dict[str, Any]]


def page(
    capacity: float,
    runs: Sequence[Run],
    judged: Sequence[dict[str, Any]],
    columns: Sequence[str],
    judged_columns: Sequence[str],
) -> str:
    """The whole page."""
    about = (
        f"vLLM's real scheduler in virtual time: {ENGINE['model']} on a modelled {DEVICE}, {ENGINE['max_num_seqs']} "
        f"requests at a time, {capacity:.2f} requests per second at most. Only ratios within one run say something: "
        "the device is modelled."
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Schedulers: waits over time</title>",
        f"<style>{_STYLE}\n{_colours()}</style><h1>Schedulers: who waits, and for how long</h1><p>{escape(about)}</p>",
    ]
    for (workload, seed), found in groupby(runs, key=lambda run: (run.row["workload"], run.row["seed"])):
        parts += _section(workload, seed, list(found))
    parts += ["<h2>All rows</h2>", *_table(columns, [run.row for run in runs])]
    if judged:
        parts += ["<h2>Goals</h2>", *_table(judged_columns, judged)]
    return "".join([*parts, "</html>\n"])


def _section(workload: str, seed: int, runs: Sequence[Run]) -> Iterator[str]:
    panels = [Panel(run.row["policy"], _facts(run.row), run.results) for run in runs]
    names, by_class = groups_of(panels), classed(panels)
    what, first = ("class", "P1's mean time to the first token, ") if by_class else ("tenant", "")
    told = (WORKLOADS[workload].__doc__ or "").strip().rstrip(".")
    yield f"<h2>{escape(workload)}, seed {seed}</h2><p>{escape(told)}.</p>"
    others = [("area", "longest wait of all")]
    passed = ""
    if 1.2 * max(run.row["max_wait_s"] for run in runs) >= LONG_S:
        others.append(("dash", f"{LONG_S:g} s"))
        passed = f" Where the grey area passes the dashed line somebody waited longer than {LONG_S:g} s."
    yield (
        f"<p class=soft>The mean wait of each {what} by the time of arrival, on one scale for all policies; where lines"
        f" coincide the first is on top. Lower is better.{passed} Under a policy's name: {first}the longest wait.</p>"
    )
    if any(run.row["shed"] for run in runs):
        others.append(("tick", f"at the top: turned away, in the colour of the {what}"))
    yield legend(names, others) + waits(panels)
    if not by_class:
        yield (
            "<p class=soft>Each tenant's share of the tokens that were being answered. "
            "A fair policy gives a small tenant what it asks for, whatever the others ask.</p>"
        )
        yield legend(names) + shares(panels)


def _facts(row: dict[str, Any]) -> str:
    first = "" if row["p1_mean_ms"] is None else f"P1 TTFT {row['p1_mean_ms'] / 1000:.2f} s, "
    away = f", shed {row['shed']}" if row["shed"] else ""
    return f"{first}longest wait {row['max_wait_s']:.1f} s{away}"


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows; what is text stands at the left."""
    left = {name for name in columns if rows and isinstance(rows[0][name], str)}
    head = "".join(f"<th{' class=l' if name in left else ''}>{escape(name)}" for name in columns)
    yield f"<table><tr>{head}</tr>"
    for row in rows:
        yield f"<tr>{''.join(_cell(row[name], name in left) for name in columns)}</tr>"
    yield "</table>"


def _cell(value: Any, left: bool) -> str:
    if isinstance(value, bool):
        return f"<td class={'good' if value else 'bad'}>{'yes' if value else 'NO'}"
    text = "–" if value is None else f"{value:,}" if isinstance(value, float) else str(value)
    return f"<td{' class=l' if left else ''}>{escape(text)}"


def _colours() -> str:
    def rules(colours: Sequence[str]) -> str:
        return "\n".join(f":root {{ --c{index}: {colour} }}" for index, colour in enumerate(colours))

    uses = "\n".join(
        f".s{index} {{ stroke: var(--c{index % 5}) }} .f{index} {{ fill: var(--c{index % 5}); opacity: .85 }} "
        f".k{index} {{ background: var(--c{index % 5}) }}"
        for index in range(12)
    )
    return f"{rules(_LIGHT)}\n@media (prefers-color-scheme: dark) {{ {rules(_DARK)} }}\n{uses}"
