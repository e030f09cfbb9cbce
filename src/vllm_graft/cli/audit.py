"""``vllm-graft audit``: what a vLLM release does to the patches, overrides and imports of a package."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_graft.errors import ConfigError
from vllm_graft.findings import exit_status, worst_first

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_graft.audit.model import PackageUses, Report
    from vllm_graft.audit.releases.release import Release
    from vllm_graft.audit.releases.release_finder import ReleaseFinder
    from vllm_graft.audit.uses import PackageFiles

HELP = "say what a vLLM release does to the patches, overrides and imports of packages, without installing it"

_PACKAGES: Final = "an installed package, a file or a folder; without any, every installed plugin of vLLM"
_AGAINST: Final = "a release, 'installed' or 'latest'; may be repeated (default: the newest in the catalogue)"
_BASE: Final = (
    "the release to compare with (default: the one that the package pins, the newest that its range allows, "
    "the one whose version number it has and mentions, or the installed one)"
)
# The number of parts of a JSON document that are printed together.
_PARTS: Final = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("package", nargs="*", help=_PACKAGES)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--against", nargs="+", action="extend", metavar="VERSION", help=_AGAINST)
    which.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel of vLLM instead")
    which.add_argument("--tree", type=Path, metavar="DIR", help="a folder that holds vllm/ instead")
    which.add_argument(
        "--matrix", action="store_true", help="every release in the catalogue, each compared with the one before"
    )
    parser.add_argument("--base", metavar="VERSION", help=_BASE)
    parser.add_argument(
        "--offline", action="store_true", help="contact no server: use the catalogue and the local cache"
    )
    parser.add_argument("--no-cache", action="store_true", help="read everything again, and cache nothing of it")
    parser.add_argument("--all", action="store_true", dest="every", help="show what has not changed, too")
    parser.add_argument(
        "--copies", action="store_true", help="say which release copied functions come from (reads sources)"
    )
    parser.add_argument("--no-diff", action="store_true", help="leave upstream's diffs out of the page and the comment")
    parser.add_argument("--tests", action="store_true", help="read the packages' own tests, too")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print rows and findings as JSON")
    how.add_argument("--markdown", action="store_true", help="print a comment for a pull request")
    how.add_argument("--html", type=Path, metavar="FILE", help="write one static page")


def run(args: argparse.Namespace) -> int:
    """Audit packages and print the report; exit status 1 if a finding is at level error."""
    from vllm_graft.audit.releases.release_finder import INSTALLED, LATEST, ReleaseFinder
    from vllm_graft.audit.uses import collector_paused, installed_plugins, locate

    # --against takes several words; those that are not releases are packages.
    words = args.against or []
    releases = [word for word in words if word in (INSTALLED, LATEST) or re.match(r"v?\d", word)]
    others = [word for word in words if word not in releases]
    if releases and others:
        args.package, args.against = [*args.package, *others], releases
    # Packing and printing a report make many objects, too, and what was read is still alive then.
    with collector_paused(ending=args.ends_process):
        finder = ReleaseFinder(offline=args.offline, progress=_bar("fetching vLLM's sources"))
        names = args.package or installed_plugins()
        if not names:
            what = "no package was named, and none is installed that registers plugins with vLLM"
            raise ConfigError(what, fix="name a package, a file or a folder")
        packages = [locate(name, tests=args.tests) for name in dict.fromkeys(names)]
        against = _against(args, finder)
        base, why = _base(args, finder, packages, against)
        if args.matrix:
            # A comparison with an older release says nothing about an upgrade.
            against = [release for release in against if _numbers(release.version) > _numbers(base.version)]
            if not against:
                what = f"the catalogue has no release after {base.version}"
                raise ConfigError(what, fix="name an older one with --base")
        report = _cached_report(args, packages, finder, base, against)
        if args.copies:
            from vllm_graft.audit.copies import copies

            # Copied functions are searched for in every available release.
            known = dict.fromkeys([*finder.catalogue.releases, base.version, *report.releases])
            found = [finding for _, _, finding in copies(report, list(known), finder.text)]
            report = replace(report, findings=tuple(worst_first([*report.findings, *found])))
        _show(args, report, finder, why)
        return exit_status(report.findings)


def _cached_report(
    args: argparse.Namespace, packages: list[PackageFiles], finder: ReleaseFinder, base: Release, against: list[Release]
) -> Report:
    """Return the report, from the cache if nothing has changed since."""
    from vllm_graft.audit.cache import ReportCache, report_key
    from vllm_graft.audit.report import audit, modules_of

    cache = ReportCache()
    key = None if args.no_cache else report_key(packages, base, against, steps=args.matrix)
    stored = cache.load(key) if key is not None else None
    if stored is not None:
        return stored
    uses = [_package_uses(args, package, finder, (base, *against)) for package in packages]
    modules = modules_of(uses)
    for release in (base, *against):
        finder.prefetch(release, modules)
    known = finder.older_than(against[-1]) if against else ()
    report = audit(uses, base, against, steps=args.matrix, known=known)
    if key is not None:
        _store("the report", lambda: cache.store(key, report))
    return report


def _package_uses(
    args: argparse.Namespace, package: PackageFiles, finder: ReleaseFinder, releases: tuple[Release, ...]
) -> PackageUses:
    """Return the uses of a package, from the cache if its files have not changed since."""
    from vllm_graft.audit.cache import UsesCache
    from vllm_graft.audit.uses import read_files

    catalogue = finder.catalogue
    cache = UsesCache([catalogue.release(version) for version in catalogue.releases])
    stored = cache.load(package, releases) if not args.no_cache else None
    if stored is not None:
        return stored
    uses = read_files(package, _bar(f"reading {package.package}"))
    if not args.no_cache:
        _store("the reading", lambda: cache.store(package, uses))
    return uses


def _store(what: str, store: Callable[[], None]) -> None:
    try:
        store()
    except (OSError, ValueError) as error:
        print(f"audit: {what} cannot be cached for the next run: {error}", file=sys.stderr)


def _against(args: argparse.Namespace, finder: ReleaseFinder) -> list[Release]:
    from vllm_graft.sources.origins import Tree, Wheel

    if args.wheel is not None:
        return [finder.add(Wheel(args.wheel))]
    if args.tree is not None:
        return [finder.add(Tree(args.tree))]
    if args.matrix:
        return [finder.release(version) for version in finder.catalogue.releases]
    names = args.against or [finder.catalogue.releases[-1]]
    found = {(release := finder.release(name)).version: release for name in names}
    return sorted(found.values(), key=lambda release: _numbers(release.version))


def _base(
    args: argparse.Namespace, finder: ReleaseFinder, packages: list[PackageFiles], against: list[Release]
) -> tuple[Release, str]:
    """Return the release that others are compared with, and why it was chosen."""
    from vllm_graft.audit.releases.release_finder import is_older

    if args.base:
        return finder.release(args.base), "--base"
    if args.matrix:
        return against[0], "the oldest in the catalogue"
    required = [(package.package, package.required) for package in packages if package.required is not None]
    for name, one in required:
        if one.exact and not one.by_number:
            return finder.release(one.exact), f"{name} pins it in {one.file}: vllm{one.specifier}"
    unknown = ""
    for name, one in required:
        if one.by_number:
            # The release with the package's own number, which it mentions, if that is an older one.
            if all(is_older(one.exact, release.version) for release in against):
                with contextlib.suppress(ConfigError):
                    why = f"{name} has its number, and {one.file} mentions vLLM {one.exact}"
                    return finder.release(one.exact), why
            continue
        within = f"within {name}'s vllm{one.specifier} in {one.file}"
        newest = finder.newest_within(one.specifier)
        if newest is not None:
            return finder.release(newest), f"the newest {within}"
        unknown = unknown or f"; no release is known here {within}"
    release, why = _default_base(finder, against)
    return release, f"{why}{unknown}"


def _default_base(finder: ReleaseFinder, against: list[Release]) -> tuple[Release, str]:
    """Return the release to compare with if no package states which it is for."""
    from vllm_graft.audit.releases.release_finder import same_release
    from vllm_graft.versions import vllm_version

    installed = vllm_version()

    def is_wanted(version: str) -> bool:
        return any(same_release(version, release.version) for release in against)

    if installed is not None and not is_wanted(installed):
        return finder.release("installed"), "it is installed"
    known = [version for version in finder.catalogue.releases if not is_wanted(version)]
    if not known:
        raise ConfigError("there is nothing to compare with", fix="say with --base which release the code is for")
    wanted = against[0].version
    older = [version for version in known if _numbers(version) < _numbers(wanted)]
    if older:
        return finder.release(older[-1]), "the one before"
    if not _numbers(wanted) or ".dev" in wanted:
        # A checkout states no version, or one that its tools made up, such as 0.1.dev1.
        return finder.release(known[-1]), "the newest in the catalogue"
    return finder.release(known[0]), "the oldest in the catalogue"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def _show(args: argparse.Namespace, report: Report, finder: ReleaseFinder, why: str) -> None:
    from vllm_graft.audit.render import html, markdown, text
    from vllm_graft.audit.render.presentation import count
    from vllm_graft.audit.report import with_diffs

    if (args.markdown or args.html is not None) and not args.no_diff:
        report = with_diffs(report, finder.text)
    if finder.unread:
        print(
            f"audit: the sources of {', '.join(finder.unread)} are not available: there are no diffs of them",
            file=sys.stderr,
        )
    if args.json:
        # Block by block: a large report is a million parts.
        parts = json.JSONEncoder(indent=2).iterencode(_document(report, why))
        while block := "".join(itertools.islice(parts, _PARTS)):
            sys.stdout.write(block)
        print()
        return
    if args.markdown:
        print(markdown(report))
        return
    if args.html is not None:
        page = html(report, when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
        try:
            args.html.write_text(page, encoding="utf-8")
        except OSError as error:
            what, fix = f"it cannot be written: {error.strerror}", "name a file in a folder you can write to"
            raise ConfigError(what, where=str(args.html), fix=fix) from error
        print(f"wrote {args.html}")
        return
    compared = f"compared with {report.base} ({why})" if report.base else "each compared with the one before"
    print(f"vLLM {', '.join(report.releases)}, {compared}")
    print(text(report, shutil.get_terminal_size((120, 24)).columns, every=args.every))
    for reading in report.packages:
        if reading.tests:
            print(f"{reading.package}: {count(reading.tests, 'test file')} left out; --tests reads them too")
    shown = [finding for finding in report.findings if args.every or finding.level != "info"]
    for finding in shown:
        print(finding.explain())
    if len(shown) < len(report.findings):
        print(f"{len(report.findings) - len(shown)} more at level info: --all shows them")


def _document(report: Report, why: str) -> dict[str, object]:
    return {
        "base": report.base,
        "base_because": why,
        "releases": list(report.releases),
        "packages": [
            {
                "package": each.package,
                "version": each.version,
                "files": each.files,
                "tests_left_out": each.tests,
                "uses": len(each.uses),
            }
            for each in report.packages
        ],
        "rows": [
            {
                "package": row.package,
                "way": row.use.way,
                "name": row.use.name,
                "where": row.use.where,
                "owner": row.use.owner,
                "patch": row.use.patch.name if row.use.patch is not None else "",
                "guarded": row.use.guarded,
                "cells": [
                    {
                        "release": cell.release,
                        "since": cell.since,
                        "state": cell.verdict.state,
                        "detail": cell.verdict.detail,
                        "now": cell.verdict.now,
                    }
                    for cell in row.cells
                ],
            }
            for row in report.rows
        ],
        "findings": [finding.as_dict() for finding in report.findings],
    }


def _bar(step: str) -> Callable[[int, int], None] | None:
    """Return a progress bar on a terminal, drawn once the step has taken a second; nothing elsewhere."""
    from vllm_graft.cli.printing import ProgressLine

    line = ProgressLine(patience_s=1.0)
    return (lambda done, total: line(step, done, total)) if sys.stderr.isatty() else None
