"""``vllm-graft status``: every running server, a row per process, and what any of them lacks."""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from vllm_graft.cli.queues import render_queues
from vllm_graft.cli.table import paint, show_findings, table
from vllm_graft.errors import SetupError
from vllm_graft.findings import Finding, exit_status
from vllm_graft.ledger import RunView, runs, state_folder

HELP = "show what is active in every process of every running server; exit 1 if something planned is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print servers, processes, queues and findings as JSON")
    parser.add_argument(
        "--watch", nargs="?", const=2.0, type=float, metavar="SECONDS", help="print again every so often (2 s)"
    )
    parser.add_argument("--url", help="ask a running server instead of reading this machine's records")
    parser.add_argument(
        "--api-key", default=os.environ.get("VLLM_API_KEY"), help="the server's API key (default: VLLM_API_KEY)"
    )
    parser.add_argument("--all", action="store_true", help="show processes that ended in order too")


def run(args: argparse.Namespace) -> int:
    """Print once, or again and again until interrupted."""
    while True:
        servers = [ask(args.url, args.api_key)] if args.url else [view.as_dict() for view in runs()]
        if args.watch is not None and not args.json:
            print("\x1b[2J\x1b[H", end="")
        findings = [Finding.from_dict(_texts(row)) for server in servers for row in _rows(server["findings"])]
        print(json.dumps(servers, indent=2) if args.json else render(servers, findings, everyone=args.all), flush=True)
        if args.watch is None:
            return exit_status(findings)
        time.sleep(args.watch)


def render(servers: Sequence[Mapping[str, object]], findings: Sequence[Finding], *, everyone: bool = False) -> str:
    """Servers and findings as text for a person."""
    if not servers:
        return f"no server with a plan runs here (records: {state_folder() or 'none'})"
    parts = [render_server(server, everyone=everyone) for server in servers]
    parts += [
        paint(f"last error in {row['name']} (pid {row['pid']}): {row['last_error']}", "yellow")
        for server in servers
        for row in _rows(server["processes"])
        if row["last_error"]
    ]
    verdict = show_findings(findings) if findings else paint("every process has what its plan names", "green")
    return "\n".join([*parts, verdict])


def render_server(server: Mapping[str, object], *, everyone: bool = False) -> str:
    """One server as a table with a row per process, and one of what waits in its queues."""
    plan = server["plan"]
    assert isinstance(plan, Mapping)
    shown = [row for row in _rows(server["processes"]) if everyone or row["life"] != "ended"]
    rows = [
        (
            str(row["name"]),
            str(row["pid"]),
            "+".join(str(role) for role in _list(row["roles"])),
            f"{row['life']} ({row['start_method']})",
            f"{row['vllm']} {row['runner']}".strip(),
            "\n".join(_item(item) for item in _rows(row["items"])) or "nothing needed here",
        )
        for row in shown
    ]
    head = ("PROCESS", "PID", "ROLE", "LIFE", "VLLM", "ITEMS")
    queues = render_queues(_rows(server.get("queues", [])))  # a server of another version may have none
    return "\n".join(filter(None, [f"{server['model']}  plan {plan['hash']}", table(head, rows), queues]))


def render_run(view: RunView) -> str:
    """One run, with its findings."""
    return render([view.as_dict()], view.findings())


def ask(url: str, key: str | None) -> dict[str, object]:
    """What a running server answers on ``/graft/status``."""
    address = url.rstrip("/") + "/graft/status"
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=90) as answer:
            found: dict[str, object] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise SetupError(
            f"the server answered {error.code} {error.reason}", where=address, fix=_next(error.code)
        ) from error
    except (OSError, ValueError) as error:
        raise SetupError(
            f"no answer: {error}", where=address, fix="see that the server runs and the address is right"
        ) from error


def _next(code: int) -> str:
    if code in (401, 403):
        return "give the server's key with --api-key"
    if code == 404:
        return "this server runs without a plan, or with endpoint = false"
    return "look at the server's log"


def _item(item: Mapping[str, object]) -> str:
    state = str(item["state"])
    tone = {"applied": "green", "armed": "green", "quarantined": "yellow", "drifted": "yellow"}.get(state, "red")
    calls = f", {item['calls']} calls" if item["calls"] else ""
    reason = f" ({item['reason']})" if item["reason"] and state not in ("applied", "armed") else ""
    return f"{item['name']}: {paint(state, tone)}{calls}{_cost(item)}{reason}"


def _cost(item: Mapping[str, object]) -> str:
    hooks = item["hooks"]
    assert isinstance(hooks, Mapping)
    shown = [hook for hook in hooks.values() if hook["budget_us"] and hook["calls"]]
    return "".join(f", p99 {hook['p99_us']:.0f} us of {hook['budget_us']:g}" for hook in shown)


def _rows(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return value


def _texts(row: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in row.items()}


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
