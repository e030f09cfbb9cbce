"""``/graft/status`` for a browser: one plain page, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from vllm_graft.ledger.queue_statistics import busiest
from vllm_graft.text import printable

_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: .92em }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid #8884; vertical-align: top }
th { font-weight: 600 }
td { font-variant-numeric: tabular-nums }
td.long, li { overflow-wrap: anywhere }
ul { list-style: none; padding: 0 }
li { border-left: 3px solid #8888; margin: .5rem 0; padding-left: .7rem }
code { font-size: .92em }
.good { color: #1a7f37 } .bad { color: #cf222e } .worrying { color: #9a6700 } .soft { opacity: .7 }
li.bad, li.worrying { border-color: currentColor }
@media (prefers-color-scheme: dark) {
  .good { color: #3fb950 } .bad { color: #ff7b72 } .worrying { color: #d29922 }
}
""".strip()

_TONES: Final = {"error": "bad", "warning": "worrying"}
_HEAD: Final = ("process", "pid", "role", "life", "vLLM", "item", "state", "calls", "cost")


def status_page(found: Mapping[str, object]) -> str:
    """The status document as HTML."""
    findings = _rows(found["findings"])
    verdict = '<p class="good">Every process has what its plan names.</p>'
    if findings:
        verdict = f"<ul>{''.join(_finding(row) for row in findings)}</ul>"
    plan = found["plan"]
    assert isinstance(plan, Mapping)
    body = "".join(_process(row) for row in _rows(found["processes"]))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>vllm-graft</title>"
        f"<style>{_STYLE}</style><h1>vllm-graft</h1>"
        f"<p>{_text(found['model'])} <span class=soft>plan {_text(plan['hash'])}</span></p>{verdict}"
        f"<table><tr>{''.join(f'<th>{title}' for title in _HEAD)}</tr>"
        f"{body}</table>{_queues(_rows(found['queues']))}"
    )


def _finding(row: Mapping[str, object]) -> str:
    where = f" <span class=soft>[{_text(row['where'])}]</span>" if row["where"] else ""
    fix = f"<br><span class=soft>Next: {_text(row['fix'])}</span>" if row["fix"] else ""
    return (
        f'<li class="{_TONES.get(str(row["level"]), "soft")}"><code>{_text(row["code"])}</code> {_text(row["level"])}: '
        f"{_text(row['subject'])}: {_text(row['what'])}{where}{fix}</li>"
    )


_FIGURES: Final = {
    "item": "queue", "pid": "pid", "label": "by", "value": "", "waiting": "waiting", "running": "running",
    "admitted": "admitted", "refused": "refused", "ended": "ended", "aborted": "aborted", "wait_mean_s": "mean wait, s",
    "wait_p99_s": "p99, s", "wait_max_s": "longest, s", "tokens": "tokens", "share": "share",
}  # fmt: skip


def _queues(rows: Sequence[Mapping[str, object]]) -> str:
    if not rows:
        return ""
    kept, left_out = busiest(rows)
    head = "".join(f"<th>{_text(title)}" for title in _FIGURES.values())
    lines = "".join(f"<tr>{''.join(_figure(row, name) for name in _FIGURES)}</tr>" for row in kept)
    more = f"<p class=soft>and {left_out} more, in the JSON document</p>" if left_out else ""
    return f"<h2>Queues</h2><table><tr>{head}</tr>{lines}</table>{more}"


def _figure(row: Mapping[str, object], name: str) -> str:
    value = row[name]
    if name == "share" and isinstance(value, float):
        return f"<td>{100 * value:.1f}&nbsp;%"
    return f"<td{' class=long' if name in ('item', 'value') else ''}>{_text('' if value is None else value)}"


def _process(row: Mapping[str, object]) -> str:
    roles = row["roles"]
    assert isinstance(roles, list)
    items = _rows(row["items"]) or [_NOTHING]
    life = f"<span class={_LIVES.get(str(row['life']), 'soft')}>{_text(row['life'])}</span>"
    cells = (
        f"{_text(row['name'])}<br><span class=soft>{_text(row['host'])}, {_text(row['start_method'])}</span>",
        _text(row["pid"]),
        _text("+".join(roles)),
        life,
        f"{_text(row['vllm'])} {_text(row['runner'])}",
    )
    head = "".join(f"<td rowspan={len(items)}>{cell}" for cell in cells).replace("<td", "<td class=long", 1)
    lines = [_item(item) for item in items]
    return f"<tr>{head}{lines[0]}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines[1:])


def _item(item: Mapping[str, object]) -> str:
    state = str(item["state"])
    reason = f"<br><span class=soft>{_text(item['reason'])}</span>" if item["reason"] else ""
    hooks = item["hooks"]
    assert isinstance(hooks, Mapping)
    cost = "<br>".join(_cost(name, hook) for name, hook in hooks.items() if hook["calls"])
    shown = f"<span class={_STATES.get(state, 'bad')}>{_text(state)}</span>{reason}"
    return f"<td class=long>{_text(item['name'])}<td class=long>{shown}<td>{_text(item['calls'])}<td class=long>{cost}"


def _cost(name: str, hook: Mapping[str, object]) -> str:
    """What was called, and what it took where it has a budget."""
    shown = f"<code>{_text(name.rpartition(':')[2])}</code>"
    if not hook["budget_us"]:
        return shown
    overruns = f", {hook['overruns']} over" if hook["overruns"] else ""
    errors = f", {hook['errors']} failed" if hook["errors"] else ""
    return shown + _text(f" p99 {hook['p99_us']:.0f} of {hook['budget_us']:g} us{overruns}{errors}")


_NOTHING: Final = {"name": "", "state": "nothing needed here", "reason": "", "calls": "", "hooks": {}}

_LIVES: Final = {"running": "good", "died": "bad"}

_STATES: Final = {
    "applied": "good", "armed": "good", "nothing needed here": "soft",
    "quarantined": "worrying", "drifted": "worrying", "skipped": "worrying",
}  # fmt: skip


def _rows(value: object) -> Sequence[Mapping[str, object]]:
    assert isinstance(value, list)
    return value


def _text(value: object) -> str:
    return escape(printable(str(value)), quote=True)
