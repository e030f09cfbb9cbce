"""``vllm-graft items``: the items that a plan may name, with their options and request keys."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from vllm_graft.cli.printing import render_options, show_findings, table
from vllm_graft.contracts.attention import KVPolicy
from vllm_graft.contracts.item import Item, OptionValue, summary_of
from vllm_graft.contracts.request_keys import Key
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.errors import ConfigError, nearest
from vllm_graft.findings import Finding, exit_status
from vllm_graft.plan.catalogue import CatalogueEntry, catalogue
from vllm_graft.plan.resolution import fits
from vllm_graft.points import POINTS, ROLES

HELP = "list what a plan may name: every item that ships or is installed, with its options and request keys"


_HEAD = ("ITEM", "POINT", "PACKAGE", "OPTIONS", "REQUEST KEYS")


@dataclass(frozen=True, slots=True)
class ItemDescription:
    """One item that a plan may name.

    summary: the first paragraph of the class's docstring
    options: every option with its default
    keys:    what a request may carry for it, as ``GET /graft/samplers`` gives them; of a KV policy the names are known
    vllm:    the releases a patch is written for; empty for all
    """

    name: str
    point: str
    key: str
    package: str
    target: str
    summary: str
    roles: tuple[str, ...]
    options: dict[str, OptionValue]
    keys: list[dict[str, object]]
    vllm: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", nargs="?", help="show one item in full")
    parser.add_argument("--json", action="store_true", help="print items and findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the items; return 1 if one cannot be imported."""
    known = catalogue()
    if args.name is not None and args.name not in known:
        raise ConfigError(f"there is no item {args.name!r}{nearest(args.name, known)}", fix="run `vllm-graft items`")
    rows: list[ItemDescription] = []
    findings: list[Finding] = []
    for entry in known.values():
        if args.name not in (None, entry.name):
            continue
        try:
            row = describe_item(entry)
            _in_full(row)  # fails if an option or a key cannot be shown
        except ConfigError as error:
            findings.append(Finding("P010", "error", f"item {entry.name}", error.what, error.where, error.fix))
        except Exception as error:  # whatever a foreign class declares, the other items are listed
            what = f"{entry.target} of {entry.package} cannot be described: {type(error).__name__}: {error}"
            fix = "correct the options or keys that the class declares"
            findings.append(Finding("P010", "error", f"item {entry.name}", what, f"entry point {entry.name}", fix))
        else:
            rows.append(row)
    if args.json:
        document = {"items": [asdict(row) for row in rows], "findings": [each.as_dict() for each in findings]}
        print(json.dumps(document, indent=2))
        return exit_status(findings)
    if rows:
        keys = [", ".join(str(key["name"]) for key in row.keys) or "-" for row in rows]
        cells = [
            (row.name, row.point, row.package, render_options(row.options), names)
            for row, names in zip(rows, keys, strict=True)
        ]
        print(_in_full(rows[0]) if args.name is not None else table(_HEAD, cells))
    if findings:
        print(show_findings(findings))
    return exit_status(findings)


def describe_item(entry: CatalogueEntry) -> ItemDescription:
    """Import an item's class and return its declarations; raise ConfigError if it implements no contract."""
    kind = entry.load()
    point = next((point for point in POINTS if point.key and point.contracts and fits(kind, point)), None)
    if point is None:
        what = f"{entry.target} of {entry.package} fulfils no contract"
        fix = "derive the class from one of the contracts that `vllm-graft points` names"
        raise ConfigError(what, where=f"entry point {entry.name}", fix=fix)
    declaration = getattr(kind, "declaration", None)
    roles = point.roles if declaration is None else tuple(role for role in ROLES if role in declaration.processes)
    keys = [key.as_dict() for key in kind.request_keys()] if issubclass(kind, OptInSampler) else []
    if issubclass(kind, KVPolicy):
        keys = [Key(name).as_dict() | {"default": None} for name in kind.keys]
    return ItemDescription(
        name=entry.name,
        point=point.name,
        key=point.key,
        package=entry.package,
        target=entry.target,
        summary=summary_of(kind),
        roles=roles,
        options=dict(kind.options) if issubclass(kind, Item) else {},
        keys=keys,
        vllm=declaration.vllm if declaration is not None else "",
    )


def _in_full(row: ItemDescription) -> str:
    keys = []
    for key in row.keys:
        low, high = key["min"], key["max"]
        if low is not None and high is not None:
            span = f", {low:g} to {high:g}"
        elif low is not None:
            span = f", at least {low:g}"
        else:
            span = "" if high is None else f", at most {high:g}"
        keys.append(f"{key['name']}: {key['type']}{span}, default {json.dumps(key['default'])}")
    fields = [
        ("point", f"{row.point}; named under `{row.key}` in graft.toml"),
        ("package", row.package),
        ("class", row.target),
        ("what it does", row.summary or "-"),
        ("runs in", "+".join(row.roles)),
        ("vllm", row.vllm or "every release the point is bound on"),
        ("options", render_options(row.options)),
        ("request keys", "\n".join(keys) or "-"),
    ]
    return table(("FIELD", row.name), fields)
