"""D003: metadata that hides another distribution of the same name, and the plugins registered there."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import GROUPS, Environment, parse_version
from vllm_graft.findings import Finding, Level
from vllm_graft.plan.catalogue import ITEM_GROUP

CODE = "D003"
TITLE = "Metadata that hides another copy of the package and its plugins"


def check(env: Environment) -> Iterator[Finding]:
    """Find a stale ``.egg-info`` or another first copy of a package: Python shows only the first of a name."""
    seen = {package.name: package for package in env.packages if not package.hidden}
    for package in env.packages:
        first = seen[package.name]
        taken = {(entry.group, entry.name): entry.value for entry in first.entries}
        lost = []
        for entry in package.entries if package.hidden else ():
            instead = taken.get((entry.group, entry.name))
            if entry.group in (*GROUPS, ITEM_GROUP) and instead != entry.value:
                given = f", instead of which {instead} is taken" if instead is not None else ""
                lost.append(f"{entry.name} of {entry.group} ({entry.value}{given})")
        if not lost:
            continue
        what = (
            f"the copy {first.version or 'of no version'} at {first.where} hides {package.version or 'another'} at "
            f"{package.where}, whose entry points are not found: {', '.join(lost)}"
        )
        where = str(first.where)
        # An older copy behind a newer one is the usual end of an upgrade.
        mine, other = parse_version(package.version), parse_version(first.version)
        if mine is not None and other is not None and mine < other:
            fix = "uninstall the older copy if it is not needed elsewhere"
            yield Finding(CODE, "info", f"package {package.name}", what, where, fix)
        else:
            # Installed as a whole, it may be meant to go before the other; what lies beside sources never is.
            level: Level = "error" if first.where.suffix == ".egg-info" else "warning"
            fix = f"remove the one that is out of date, then install {package.name} again"
            yield Finding(CODE, level, f"package {package.name}", what, where, fix)
