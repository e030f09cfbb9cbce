"""The routes under ``/graft``: what every process of this server reports of itself, and its samplers."""

from __future__ import annotations

import functools
import hmac
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from vllm_graft.bindings.sampling.requests import describe_samplers
from vllm_graft.findings import Finding, worst_first
from vllm_graft.ledger import ProcessRow, StatusDocument, current, status_document
from vllm_graft.ledger.quarantine import QuarantineReader
from vllm_graft.ledger.queue_statistics import QueueRow, busiest
from vllm_graft.ledger.status import ItemRow
from vllm_graft.plan import Plan, inherited_run
from vllm_graft.text import printable

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

Status = Callable[[], Awaitable[tuple[list[ProcessRow], list[Finding]]]]
"""Returns every process of the server, and the findings about them."""

Route = Callable[["Request"], Awaitable["Response"]]
"""Answers a request to one of the routes."""


def install_status(app: FastAPI, run: str, look: Status, plan: Plan, keys: Callable[[], list[str]]) -> None:
    """Add the routes to vLLM's application; ``keys`` returns the API keys, which vLLM knows later."""
    from starlette.responses import HTMLResponse, JSONResponse

    quarantine = QuarantineReader(current())

    def with_key(route: Route) -> Route:
        @functools.wraps(route)
        async def checked(request: Request) -> Response:
            if not is_allowed(request.headers.get("authorization"), keys()):
                return JSONResponse({"error": "missing or invalid API key"}, 401)
            return await route(request)

        return checked

    @with_key
    async def status(request: Request) -> Response:
        rows, findings = await look()
        document = status_document(run, plan, rows, findings, with_options=False)
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(status_page(document))
        return JSONResponse(document)

    @with_key
    async def samplers(request: Request) -> Response:
        return JSONResponse(describe_samplers(plan, inherited_run(), quarantine.reasons()))

    app.router.add_route("/graft/status", status, methods=["GET"])
    app.router.add_route("/graft/samplers", samplers, methods=["GET"])


def server_keys(args: Namespace) -> list[str]:
    """Return the API keys this server was started with; empty if it needs none."""
    from vllm import envs

    # As in vLLM, --api-key takes precedence over VLLM_API_KEY.
    given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
    keys = [given] if isinstance(given, str) else given
    return [key for key in keys if key]


def is_allowed(header: str | None, keys: Iterable[str]) -> bool:
    """Return whether an ``Authorization`` header has one of the keys, compared in constant time.

    vLLM checks keys only on paths under ``/v1`` and a few others, so ours check for themselves.
    """
    scheme, _, token = (header or "").partition(" ")
    # All keys are compared, so that the time does not tell which one is nearly right.
    matches = [hmac.compare_digest(token.strip().encode(), key.encode()) for key in keys]
    return not matches or (scheme.lower() == "bearer" and any(matches))


_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-size: .92em }
th, td { text-align: left; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid #8884; vertical-align: top }
th { font-weight: 600 }
td { font-variant-numeric: tabular-nums }
td.long, li, p { overflow-wrap: anywhere }
td.long { min-width: 6.5rem }
.wide { overflow-x: auto }
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


def status_page(found: StatusDocument) -> str:
    """Render the status document as one HTML page without scripts."""
    findings = [each.as_dict() for each in worst_first(map(Finding.from_dict, found["findings"]))]
    verdict = '<p class="good">Every process has what its plan names.</p>'
    if findings:
        verdict = f"<ul>{''.join(_finding(row) for row in findings)}</ul>"
    for row in found["processes"]:
        if row["last_error"]:
            verdict += f"<p class=worrying>last error in {_text(row['name'])} (pid {_text(row['pid'])}): "
            verdict += f"{_text(row['last_error'])}</p>"
    body = "".join(_process(row) for row in found["processes"])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>vllm-graft</title>"
        f"<style>{_STYLE}</style><h1>vllm-graft</h1>"
        f"<p>{_text(found['model'])} <span class=soft>plan {_text(found['plan']['hash'])}</span></p>{verdict}"
        f"<table><tr>{''.join(f'<th>{title}' for title in _HEAD)}</tr>"
        f"{body}</table>{_queues(found['queues'])}"
    )


def _finding(row: Mapping[str, str]) -> str:
    where = f" <span class=soft>[{_text(row['where'])}]</span>" if row["where"] else ""
    fix = f"<br><span class=soft>Next: {_text(row['fix'])}</span>" if row["fix"] else ""
    return (
        f'<li class="{_TONES.get(row["level"], "soft")}"><code>{_text(row["code"])}</code> {_text(row["level"])}: '
        f"{_text(row['subject'])}: {_text(row['what'])}{where}{fix}</li>"
    )


_QUEUE_COLUMNS: Final = {
    "item": "queue", "pid": "pid", "label": "by", "value": "", "waiting": "waiting", "running": "running",
    "admitted": "admitted", "refused": "refused", "ended": "ended", "aborted": "aborted", "wait_mean_s": "mean wait, s",
    "wait_p99_s": "p99, s", "wait_max_s": "longest, s", "tokens": "tokens", "share": "share",
}  # fmt: skip


def _queues(rows: Sequence[QueueRow]) -> str:
    if not rows:
        return ""
    kept, left_out = busiest(rows)
    head = "".join(f"<th>{_text(title)}" for title in _QUEUE_COLUMNS.values())
    lines = ""
    for row in kept:
        lines += "<tr>"
        for name in _QUEUE_COLUMNS:
            value = row[name]  # type: ignore[literal-required]
            if name == "share" and isinstance(value, float):
                lines += f"<td>{100 * value:.1f}&nbsp;%"
            else:
                long = " class=long" if name in ("item", "value") else ""
                lines += f"<td{long}>{_text('' if value is None else value)}"
        lines += "</tr>"
    more = f"<p class=soft>and {left_out} more, in the JSON document</p>" if left_out else ""
    return f"<h2>Queues</h2><div class=wide><table><tr>{head}</tr>{lines}</table></div>{more}"


def _process(row: ProcessRow) -> str:
    items = row["items"] or [_NOTHING]
    life = f"<span class={_LIVES.get(row['life'], 'soft')}>{_text(row['life'])}</span>"
    cells = (
        f"{_text(row['name'])}<br><span class=soft>{_text(row['host'])}, {_text(row['start_method'])}</span>",
        _text(row["pid"]),
        _text("+".join(row["roles"])),
        life,
        f"{_text(row['vllm'])} {_text(row['runner'])}",
    )
    head = "".join(f"<td rowspan={len(items)}>{cell}" for cell in cells).replace("<td", "<td class=long", 1)
    lines = [_item(item) for item in items]
    return f"<tr>{head}{lines[0]}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines[1:])


def _item(item: ItemRow) -> str:
    state = item["state"]
    reason = f"<br><span class=soft>{_text(item['reason'])}</span>" if item["reason"] else ""
    costs = []
    for name, hook in item["hooks"].items():
        if hook["calls"]:
            costs.append(f"<code>{_text(name.rpartition(':')[2])}</code>")
            if hook["budget_us"]:
                overruns = f", {hook['overruns']} over" if hook["overruns"] else ""
                errors = f", {hook['errors']} failed" if hook["errors"] else ""
                costs[-1] += _text(f" p99 {hook['p99_us']:.0f} of {hook['budget_us']:g} us{overruns}{errors}")
    costs += (_text(f"{number} {name}") for name, number in item.get("figures", {}).items())
    shown = f"<span class={_STATES.get(state, 'bad')}>{_text(state)}</span>{reason}"
    calls = item["calls"] if item["name"] else ""
    return f"<td class=long>{_text(item['name'])}<td class=long>{shown}<td>{calls}<td class=long>{'<br>'.join(costs)}"


_NOTHING: Final[ItemRow] = {
    "point": "", "name": "", "state": "nothing needed here", "reason": "", "calls": 0, "hooks": {},
}  # fmt: skip

_LIVES: Final = {"running": "good", "died": "bad"}

_STATES: Final = {
    "applied": "good", "armed": "good", "nothing needed here": "soft",
    "quarantined": "worrying", "drifted": "worrying", "skipped": "worrying",
}  # fmt: skip


def _text(value: object) -> str:
    return escape(printable(str(value)), quote=True)
