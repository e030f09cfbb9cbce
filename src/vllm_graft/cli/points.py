"""``vllm-graft points``: the table of extension points."""

from __future__ import annotations

import argparse
import json

from vllm_graft.cli.printing import table
from vllm_graft.points import POINTS, Point

HELP = "show every extension point: contract, budget, where it runs, releases it is bound on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", nargs="?", help="show one point in full")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table, or one row in full."""
    from vllm_graft.errors import ConfigError, nearest

    names = [point.name for point in POINTS]
    if args.name is not None and args.name not in names:
        raise ConfigError(f"there is no point {args.name!r}{nearest(args.name, names)}", fix="run `vllm-graft points`")
    chosen = [point for point in POINTS if args.name in (None, point.name)]
    if args.json:
        print(json.dumps([point.as_dict() for point in chosen], indent=2))
    elif args.name is not None:
        print(_in_full(chosen[0]))
    else:
        rows = [(p.name, p.key or "-", _contracts(p), p.budget, "+".join(p.roles), _bound(p)) for p in chosen]
        print(table(("POINT", "KEY", "CONTRACT", "BUDGET", "RUNS IN", "BOUND ON VLLM"), rows))
    return 0


def _in_full(point: Point) -> str:
    rows = [
        (key, "\n".join(value) if isinstance(value, tuple) else str(value)) for key, value in point.as_dict().items()
    ]
    return table(("FIELD", point.name), rows)


def _contracts(point: Point) -> str:
    if not point.bound:
        return "not bound yet"
    return "\n".join(contract.partition(":")[2] for contract in point.contracts) or "-"


def _bound(point: Point) -> str:
    return f"{point.bound[0]} to {point.bound[-1]}" if point.bound else "not yet"
