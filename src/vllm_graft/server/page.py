"""``/graft/status`` for a browser: one plain page, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from vllm_graft.ledger.figures import busiest

_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .35rem .8rem; border-bottom: 1px solid #8884; vertical-align: top }
th { font-weight: 600 }
code { font-size: .92em }
.good { color: #1a7f37 } .bad { color: #cf222e } .soft { opacity: .7 }
""".strip()


def status_page(found: Mapping[str, object]) -> str:
    """The status document as HTML."""
    findings = _rows(found["findings"])
    verdict = '<p class="good">Every process has what its plan names.</p>'
    if findings:
        lines = "".join(
            f'<li class="{"bad" if row["level"] == "error" else "soft"}"><code>{_text(row["code"])}</code> '
            f"{_text(row['subject'])}: {_text(row['what'])} <span class='soft'>{_text(row['where'])}</span> "
            f"{_text(row['fix'])}</li>"
            for row in findings
        )
        verdict = f"<ul>{lines}</ul>"
    plan = found["plan"]
    assert isinstance(plan, Mapping)
    body = "".join(_process(row) for row in _rows(found["processes"]))
    return (
        "<!doctype html><meta charset=utf-8><title>vllm-graft</title>"
        f"<style>{_STYLE}</style><h1>vllm-graft</h1>"
        f"<p>{_text(found['model'])} <span class=soft>plan {_text(plan['hash'])}</span></p>{verdict}"
        "<table><tr><th>process<th>pid<th>role<th>vLLM<th>item<th>state<th>calls</tr>"
        f"{body}</table>{_queues(_rows(found['queues']))}"
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
    lines = "".join(f"<tr>{''.join(f'<td>{_figure(row, name)}' for name in _FIGURES)}</tr>" for row in kept)
    more = f"<p class=soft>and {left_out} more, in the JSON document</p>" if left_out else ""
    return f"<h2>Queues</h2><table><tr>{head}</tr>{lines}</table>{more}"


def _figure(row: Mapping[str, object], name: str) -> str:
    value = row[name]
    if name == "share" and isinstance(value, float):
        return f"{100 * value:.1f} %"
    return _text("" if value is None else value)


def _process(row: Mapping[str, object]) -> str:
    roles = row["roles"]
    assert isinstance(roles, list)
    items = _rows(row["items"]) or [{"name": "", "state": "nothing needed here", "reason": "", "calls": ""}]
    head = (
        f"<td rowspan={len(items)}>{_text(row['name'])}<br><span class=soft>{_text(row['host'])}, "
        f"{_text(row['start_method'])}</span><td rowspan={len(items)}>{_text(row['pid'])} {_life(row)}"
        f"<td rowspan={len(items)}>{_text('+'.join(roles))}"
        f"<td rowspan={len(items)}>{_text(row['vllm'])} {_text(row['runner'])}"
    )
    cells = [
        f"<td>{_text(item['name'])}<td class='{_tone(item['state'])}' title='{_text(item['reason'])}'>"
        f"{_text(item['state'])}<td>{_text(item['calls'])}"
        for item in items
    ]
    return f"<tr>{head}{cells[0]}</tr>" + "".join(f"<tr>{cell}</tr>" for cell in cells[1:])


def _life(row: Mapping[str, object]) -> str:
    return "" if row["life"] == "running" else f"<span class=bad>{_text(row['life'])}</span>"


def _tone(state: object) -> str:
    return "good" if state in ("applied", "armed") else "bad" if state in ("refused", "late", "dead") else "soft"


def _rows(value: object) -> Sequence[Mapping[str, object]]:
    assert isinstance(value, list)
    return value


def _text(value: object) -> str:
    return escape(str(value), quote=True)
