"""``vllm-graft status``: every running server, a row per process, its queues, and findings."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Final

from vllm_graft.boot.env import switched_off
from vllm_graft.cli.printing import paint, show_findings, table
from vllm_graft.errors import SetupError
from vllm_graft.findings import Finding, exit_status
from vllm_graft.ledger import StatusDocument, runs, state_folder
from vllm_graft.ledger.queue_statistics import QueueRow, busiest
from vllm_graft.ledger.status import ItemRow
from vllm_graft.text import printable

_LONGEST_S: Final = 86400  # the longest time between two prints, in seconds

_NEXT_STEPS: Final = {
    401: "give the server's key with --api-key",
    403: "give the server's key with --api-key",
    404: "this server runs without a plan, or with endpoint = false",
}
"""The next step for an HTTP status."""

_HEAD: Final = ("PROCESS", "PID", "ROLE", "LIFE", "VLLM", "ITEMS")
_QUEUE_HEAD: Final = (
    "QUEUE", "PID", "BY", "VALUE", "WAITING", "RUNNING", "ADMITTED", "REFUSED", "ENDED", "ABORTED",
    "WAIT MEAN", "P99", "MAX", "TOKENS", "SHARE",
)  # fmt: skip

HELP = "show what is active in every process of every running server; exit 1 if something planned is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print servers, processes, queues and findings as JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=2.0,
        type=_seconds,
        metavar="SECONDS",
        help="print again every SECONDS (2 if not given)",
    )
    parser.add_argument("--url", help="ask a running server instead of reading this machine's records")
    parser.add_argument(
        "--api-key", default=os.environ.get("VLLM_API_KEY"), help="the server's API key (default: VLLM_API_KEY)"
    )
    parser.add_argument("--all", action="store_true", help="show processes that shut down cleanly too")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most {_LONGEST_S}")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Print once, or repeatedly until interrupted."""
    while True:
        servers = [ask(args.url, args.api_key)] if args.url is not None else [view.as_dict() for view in runs()]
        if args.watch is not None and not args.json and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        findings = [Finding.from_dict(row) for server in servers for row in server["findings"]]
        print(json.dumps(servers, indent=2) if args.json else render(servers, everyone=args.all), flush=True)
        if args.watch is None:
            return exit_status(findings)
        time.sleep(args.watch)
        if not args.json and not sys.stdout.isatty():
            print()


def render(servers: Sequence[StatusDocument], *, everyone: bool = False) -> str:
    """Render servers as tables, with their last errors and findings."""
    if not servers:
        return "\n".join(
            [
                f"no server with a plan runs here (records: {state_folder() or 'none'})",
                "A server for whose model nothing is planned leaves no record: `vllm-graft plan --model MODEL`, run "
                "where that server was started, says why.",
                *(finding.explain() for finding in switched_off(planned=False)),
            ]
        )
    parts = [render_server(server, everyone=everyone) for server in servers]
    parts += [
        paint(printable(f"last error in {row['name']} (pid {row['pid']}): {row['last_error']}"), "yellow")
        for server in servers
        for row in server["processes"]
        if row["last_error"]
    ]
    findings = [Finding.from_dict(row) for server in servers for row in server["findings"]]
    verdict = show_findings(findings) if findings else paint("every process has what its plan names", "green")
    return "\n".join([*parts, verdict])


def render_server(server: StatusDocument, *, everyone: bool = False) -> str:
    """Render one server: a table with a row per process, and one of its queues."""
    rows = [
        (
            printable(row["name"]),
            str(row["pid"]),
            printable("+".join(row["roles"])),
            printable(f"{row['life']} ({row['start_method']})"),
            printable(f"{row['vllm']} {row['runner']}".strip()),
            "\n".join(_item(item) for item in row["items"]) or "nothing needed here",
        )
        for row in server["processes"]
        if everyone or row["life"] != "ended"
    ]
    title = printable(f"{server['model']}  plan {server['plan']['hash']}")
    queues = render_queues(server.get("queues", []))  # a server of another version may have none
    return "\n".join(filter(None, [title, table(_HEAD, rows), queues]))


def render_queues(rows: Sequence[QueueRow]) -> str:
    """Render queue statistics as a table, a row for each value of each label; empty if there are none."""
    if not rows:
        return ""
    kept, left_out = busiest(rows)
    cells = []
    for row in kept:
        # Labels are clients' words, so they may be long and hold control characters.
        value = printable(row["value"])
        value = value if len(value) <= 40 else value[:39] + "…"
        named = [str(row[name]) for name in ("item", "pid", "label")]
        counts = [str(row[name]) for name in ("waiting", "running", "admitted", "refused", "ended", "aborted")]
        waits = (row["wait_mean_s"], row["wait_p99_s"], row["wait_max_s"])
        times = [f"{wait:.2f} s" if wait is not None else "" for wait in waits]
        cells.append([*named, value, *counts, *times, str(row["tokens"]), f"{100 * row['share']:.1f} %"])
    more = f"\nand {left_out} more: --json has all of them" if left_out else ""
    return table(_QUEUE_HEAD, cells) + more


def ask(url: str, key: str | None) -> StatusDocument:
    """Return the status document of a running server, from ``/graft/status``."""
    address = url.rstrip("/") + "/graft/status"
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=90) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        fix = _NEXT_STEPS.get(error.code, "look at the server's log")
        raise SetupError(f"the server answered {error.code} {error.reason}", where=address, fix=fix) from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        fix = "check that the server runs and the address is right"
        raise SetupError(f"no answer: {error}", where=address, fix=fix) from error
    lists = [found.get(name) for name in ("processes", "findings")] if isinstance(found, dict) else [None]
    are_rows = all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in lists)
    if not are_rows or not isinstance(found.get("plan"), dict):
        fix = "check that the address is that of a server"
        raise SetupError("the answer is not a status document of vllm-graft", where=address, fix=fix)
    document: StatusDocument = found
    try:
        document["findings"] = [{key: str(value) for key, value in row.items()} for row in document["findings"]]
        # What rendering needs is all that a command needs.
        render([document], everyone=True)
        # A server reports itself at least: of no process there is nothing to find fault with.
        if not document["processes"]:
            raise ValueError("it has no process")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"the answer is an incomplete status document: {type(error).__name__}: {error}"
        raise SetupError(what, where=address, fix="use the vllm-graft of the server's version") from error
    return document


def _item(item: ItemRow) -> str:
    state = item["state"]
    tone = {"applied": "green", "armed": "green", "quarantined": "yellow", "drifted": "yellow"}.get(state, "red")
    number = "1 call" if item["calls"] == 1 else f"{item['calls']} calls"
    # The called hooks: their cost if they have a budget, and the calls of each if there are several.
    called = {name: hook for name, hook in item["hooks"].items() if hook["calls"]}
    shown = []
    for name, hook in called.items():
        each = str(hook["calls"]) if len(called) > 1 else ""
        cost = f"p99 {hook['p99_us']:.0f} us of {hook['budget_us']:g}" if hook["budget_us"] else ""
        # Of a patched method, the name without its module.
        shown.append(" ".join(filter(None, [name.rpartition(":")[2], each, cost])))
    hooks = f" ({', '.join(shown)})" if shown else ""
    calls = f", {number}{hooks}" if item["calls"] else ""
    figures = "".join(f", {number} {name}" for name, number in item.get("figures", {}).items())
    reason = f" ({item['reason']})" if item["reason"] and state not in ("applied", "armed") else ""
    return f"{printable(item['name'])}: {paint(printable(state), tone)}{printable(calls + figures + reason)}"
