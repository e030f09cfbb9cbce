"""``vllm-graft points``: the table of extension points."""

from __future__ import annotations

import argparse
import json

from vllm_graft.cli.printing import table
from vllm_graft.errors import ConfigError, nearest
from vllm_graft.points import POINTS

HELP = "show every extension point: contract, budget, where it runs, releases it is bound on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", nargs="?", help="show one point in full")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table, or one row in full."""
    names = [point.name for point in POINTS]
    if args.name is not None and args.name not in names:
        raise ConfigError(f"there is no point {args.name!r}{nearest(args.name, names)}", fix="run `vllm-graft points`")
    chosen = [point for point in POINTS if args.name in (None, point.name)]
    if args.json:
        print(json.dumps([point.as_dict() for point in chosen], indent=2))
    elif args.name is not None:
        fields = chosen[0].as_dict().items()
        rows = [(key, "\n".join(value) if isinstance(value, tuple) else str(value)) for key, value in fields]
        print(table(("FIELD", args.name), rows))
    else:
        head = ("POINT", "KEY", "CONTRACT", "BUDGET", "RUNS IN", "BOUND ON VLLM")
        cells = []
        for point in chosen:
            contracts = "\n".join(contract.partition(":")[2] for contract in point.contracts) or "-"
            contracts = contracts if point.bound else "not bound yet"
            bound = f"{point.bound[0]} to {point.bound[-1]}" if point.bound else "not yet"
            cells.append((point.name, point.key or "-", contracts, point.budget, "+".join(point.roles), bound))
        print(table(head, cells))
    return 0
