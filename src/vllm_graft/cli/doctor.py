"""``vllm-graft doctor``: why is it not active? Every way a plugin gets lost, with the next step."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys

from vllm_graft.cli.printing import ProgressLine, paint, show_findings, table
from vllm_graft.doctor import Environment, examine
from vllm_graft.doctor.summary import Plugin, plugins
from vllm_graft.findings import Finding, exit_status, worst_first

HELP = "say which plugins vLLM will load, which it will lose, and why; nothing is started"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; everything else counts as an argument for vLLM."""
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
    """Examine, and show it; exit status 1 if something is at level error."""
    env = Environment.gather(args.rest)
    findings = examine(env)
    if args.imports:
        from vllm_graft.doctor.imports import examine_imports

        line = ProgressLine()
        findings += examine_imports(env, progress=lambda done, total: line("importing plugins", done, total))
    if args.url is not None:
        from vllm_graft.cli.status import ask

        findings += [Finding.from_dict(row) for row in ask(args.url, args.api_key)["findings"]]
    findings = worst_first(findings)
    rows = plugins(env, findings)
    if args.json:
        document = {
            "vllm": env.vllm,
            "python": platform.python_version(),
            "plugins": [row.as_dict() for row in rows],
            "findings": [finding.as_dict() for finding in findings],
        }
        print(json.dumps(document, indent=2))
    else:
        print(render(env, rows, findings))
    return exit_status(findings)


def render(env: Environment, rows: list[Plugin], findings: list[Finding]) -> str:
    """Render what is installed, what becomes of it, and what is wrong, for a person."""
    parts = [f"vLLM {env.vllm or 'is not installed'}, Python {platform.python_version()}, {sys.prefix}"]
    cells = []
    for row in rows:
        state = "idle" if row.idle else "yes" if row.loads else "no"
        loads = ", ".join(row.codes) or (paint(state, "green") if state == "yes" else state)
        cells.append((row.name, row.group.removeprefix("vllm."), row.package, loads, row.where))
    head = ("PLUGIN", "GROUP", "PACKAGE", "LOADS", "WHERE")
    parts.append(table(head, cells) if cells else "no package registers a plugin")
    parts.append(show_findings(findings) if findings else paint("nothing is lost", "green"))
    return "\n".join(parts)
