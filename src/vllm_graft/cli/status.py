"""``vllm-graft status``: every running server, a row per process, and what any of them lacks."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from vllm_graft.cli.queues import render_queues
from vllm_graft.cli.switches import switched_off
from vllm_graft.cli.table import paint, show_findings, table
from vllm_graft.errors import SetupError
from vllm_graft.findings import Finding, exit_status
from vllm_graft.ledger import RunView, runs, state_folder
from vllm_graft.text import printable

_LONGEST_S = 86400
"""The longest time between two prints, in seconds."""

HELP = "show what is active in every process of every running server; exit 1 if something planned is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print servers, processes, queues and findings as JSON")
    parser.add_argument(
        "--watch", nargs="?", const=2.0, type=_seconds, metavar="SECONDS", help="print again every so often (2 s)"
    )
    parser.add_argument("--url", help="ask a running server instead of reading this machine's records")
    parser.add_argument(
        "--api-key", default=os.environ.get("VLLM_API_KEY"), help="the server's API key (default: VLLM_API_KEY)"
    )
    parser.add_argument("--all", action="store_true", help="show processes that ended in order too")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most {_LONGEST_S}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Print once, or again and again until interrupted."""
    while True:
        servers = [ask(args.url, args.api_key)] if args.url else [view.as_dict() for view in runs()]
        if args.watch is not None and not args.json and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        findings = [Finding.from_dict(_texts(row)) for server in servers for row in _rows(server["findings"])]
        print(json.dumps(servers, indent=2) if args.json else render(servers, findings, everyone=args.all), flush=True)
        if args.watch is None:
            return exit_status(findings)
        time.sleep(args.watch)
        if not args.json and not sys.stdout.isatty():
            print()


def render(servers: Sequence[Mapping[str, object]], findings: Sequence[Finding], *, everyone: bool = False) -> str:
    """Servers and findings as text for a person."""
    if not servers:
        return _no_server()
    parts = [render_server(server, everyone=everyone) for server in servers]
    parts += [
        paint(printable(f"last error in {row['name']} (pid {row['pid']}): {row['last_error']}"), "yellow")
        for server in servers
        for row in _rows(server["processes"])
        if row["last_error"]
    ]
    verdict = show_findings(findings) if findings else paint("every process has what its plan names", "green")
    return "\n".join([*parts, verdict])


def _no_server() -> str:
    """Say that there is nothing to show, and what may be the reason."""
    lines = [
        f"no server with a plan runs here (records: {state_folder() or 'none'})",
        "A server for whose model nothing is planned leaves no record: `vllm-graft plan --model MODEL`, run where that "
        "server was started, says why.",
    ]
    return "\n".join([*lines, *(finding.explain() for finding in switched_off(planned=False))])


def render_server(server: Mapping[str, object], *, everyone: bool = False) -> str:
    """One server as a table with a row per process, and one of what waits in its queues."""
    plan = server["plan"]
    assert isinstance(plan, Mapping)
    shown = [row for row in _rows(server["processes"]) if everyone or row["life"] != "ended"]
    rows = [
        (
            printable(str(row["name"])),
            str(row["pid"]),
            printable("+".join(str(role) for role in _list(row["roles"]))),
            printable(f"{row['life']} ({row['start_method']})"),
            printable(f"{row['vllm']} {row['runner']}".strip()),
            "\n".join(_item(item) for item in _rows(row["items"])) or "nothing needed here",
        )
        for row in shown
    ]
    head = ("PROCESS", "PID", "ROLE", "LIFE", "VLLM", "ITEMS")
    queues = render_queues(_rows(server.get("queues", [])))  # a server of another version may have none
    return "\n".join(filter(None, [printable(f"{server['model']}  plan {plan['hash']}"), table(head, rows), queues]))


def render_run(view: RunView) -> str:
    """One run, with its findings."""
    return render([view.as_dict()], view.findings())


def ask(url: str, key: str | None) -> dict[str, object]:
    """What a running server answers on ``/graft/status``."""
    address = url.rstrip("/") + "/graft/status"
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=90) as answer:
            return _checked(json.load(answer), address)
    except urllib.error.HTTPError as error:
        raise SetupError(
            f"the server answered {error.code} {error.reason}", where=address, fix=_next(error.code)
        ) from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise SetupError(
            f"no answer: {error}", where=address, fix="see that the server runs and the address is right"
        ) from error


def _checked(found: object, address: str) -> dict[str, object]:
    """The answer, where it is a status document; SetupError where something else answers at that address."""
    if isinstance(found, dict) and isinstance(found.get("plan"), dict):
        rows = [found.get(name) for name in ("processes", "findings")]
        if all(isinstance(each, list) and all(isinstance(row, dict) for row in each) for each in rows):
            try:
                findings = [Finding.from_dict(_texts(row)) for row in _rows(found["findings"])]
                render([found], findings, everyone=True)
            except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise SetupError(
                    f"the answer is an incomplete status document: {type(error).__name__}: {error}",
                    where=address,
                    fix="use the vllm-graft of the server's version",
                ) from error
            return found
    raise SetupError(
        "the answer is no status document of vllm-graft", where=address, fix="see that the address is that of a server"
    )


def _next(code: int) -> str:
    if code in (401, 403):
        return "give the server's key with --api-key"
    if code == 404:
        return "this server runs without a plan, or with endpoint = false"
    return "look at the server's log"


def _item(item: Mapping[str, object]) -> str:
    state = str(item["state"])
    tone = {"applied": "green", "armed": "green", "quarantined": "yellow", "drifted": "yellow"}.get(state, "red")
    number = "1 call" if item["calls"] == 1 else f"{item['calls']} calls"
    calls = f", {number}{_hooks(item)}" if item["calls"] else ""
    reason = f" ({item['reason']})" if item["reason"] and state not in ("applied", "armed") else ""
    return f"{printable(str(item['name']))}: {paint(printable(state), tone)}{printable(calls + reason)}"


def _hooks(item: Mapping[str, object]) -> str:
    """What was called, and what it cost where it has a budget; the calls of each where there are several."""
    hooks = item["hooks"]
    assert isinstance(hooks, Mapping)
    called = {name: hook for name, hook in hooks.items() if hook["calls"]}
    shown = [
        " ".join(filter(None, [short_hook(name), str(hook["calls"]) if len(called) > 1 else "", _cost(hook)]))
        for name, hook in called.items()
    ]
    return f" ({', '.join(shown)})" if shown else ""


def short_hook(name: str) -> str:
    """A hook's name for people: of a patched method without its module."""
    return name.rpartition(":")[2]


def _cost(hook: Mapping[str, object]) -> str:
    return f"p99 {hook['p99_us']:.0f} us of {hook['budget_us']:g}" if hook["budget_us"] else ""


def _rows(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return value


def _texts(row: Mapping[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in row.items()}


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
