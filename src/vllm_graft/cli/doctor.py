"""``vllm-graft doctor``: why is it not active? Every way a plugin gets lost, with the next step."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys

from vllm_graft.cli.printing import paint, show_findings, table
from vllm_graft.doctor import Environment, examine
from vllm_graft.doctor.summary import Plugin, plugins
from vllm_graft.findings import Finding, exit_status, worst_first

HELP = "say which plugins vLLM will load, which it will lose, and why; nothing is started"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; everything else counts as what vLLM would be told."""
    parser.add_argument("--json", action="store_true", help="print plugins and findings as JSON")
    parser.add_argument(
        "--imports", action="store_true", help="import each plugin in a process of its own: this runs their code"
    )
    parser.add_argument("--url", help="ask a running server too")
    parser.add_argument(
        "--api-key", default=os.environ.get("VLLM_API_KEY"), help="the server's API key (default: VLLM_API_KEY)"
    )
    parser.epilog = "Other arguments are those that vLLM would be started with, such as --speculative-config."
    parser.set_defaults(takes_rest=True)


def run(args: argparse.Namespace) -> int:
    """Examine, and show it; exit status 1 where something is at level error."""
    env = Environment.gather(args.rest)
    findings = examine(env)
    if args.imports:
        findings += _imported(env)
    if args.url is not None:
        findings += _asked(args.url, args.api_key)
    findings = worst_first(findings)
    rows = plugins(env, findings)
    if args.json:
        print(json.dumps(_document(env, rows, findings), indent=2))
    else:
        print(render(env, rows, findings))
    return exit_status(findings)


def _imported(env: Environment) -> list[Finding]:
    from vllm_graft.cli.printing import ProgressLine
    from vllm_graft.doctor.imports import examine_imports

    line = ProgressLine()
    return examine_imports(env, progress=lambda done, total: line("importing plugins", done, total))


def _asked(url: str, key: str | None) -> list[Finding]:
    from vllm_graft.cli.status import ask

    found = ask(url, key)["findings"]
    assert isinstance(found, list)
    return [Finding.from_dict({name: str(value) for name, value in row.items()}) for row in found]


def render(env: Environment, rows: list[Plugin], findings: list[Finding]) -> str:
    """What is installed, what becomes of it, and what is wrong, for a person."""
    parts = [f"vLLM {env.vllm or 'is not installed'}, Python {platform.python_version()}, {sys.prefix}"]
    if rows:
        head = ("PLUGIN", "GROUP", "PACKAGE", "LOADS", "WHERE")
        parts.append(table(head, [_cells(row) for row in rows]))
    else:
        parts.append("no package registers a plugin")
    parts.append(show_findings(findings) if findings else paint("nothing is lost", "green"))
    return "\n".join(parts)


def _cells(row: Plugin) -> tuple[str, ...]:
    state = "idle" if row.idle else "yes" if row.loads else "no"
    loads = ", ".join(row.codes) or (paint(state, "green") if state == "yes" else state)
    return (row.name, row.group.removeprefix("vllm."), row.package, loads, row.where)


def _document(env: Environment, rows: list[Plugin], findings: list[Finding]) -> dict[str, object]:
    return {
        "vllm": env.vllm,
        "python": platform.python_version(),
        "plugins": [row.as_dict() for row in rows],
        "findings": [finding.as_dict() for finding in findings],
    }
