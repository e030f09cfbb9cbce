"""The audit itself: every use of every package, in every release that was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from vllm_graft.audit.compatibility import uncallable, vanished
from vllm_graft.audit.findings import is_for, misspelt, refused, reported
from vllm_graft.audit.model import Cell, PackageUses, Report, ReportRow, Use, Verdict
from vllm_graft.audit.releases.outline import BODY
from vllm_graft.audit.releases.release import Release
from vllm_graft.audit.verdicts import (
    ReleaseFacts,
    ReleasePair,
    adds,
    has_owner,
    is_dynamic,
    located,
    may_inherit,
    spelled,
)
from vllm_graft.findings import Finding, worst_first
from vllm_graft.patching.upstream.fingerprint import Fingerprint, Function
from vllm_graft.versions import includes

_VERSION: Final = re.compile(r"(?<![\w.#])(\d+\.\d+(?:\.\d+)?)(?![\w.])")


def audit(
    readings: Sequence[PackageUses],
    base: Release,
    against: Sequence[Release],
    *,
    steps: bool = False,
    known: Sequence[Release] = (),
) -> Report:
    """Hold packages against releases.

    Each release is compared with ``base``; with ``steps`` with the one before it, ``base`` being before the first. What
    is reported goes by the last release compared with the base either way. ``known`` are more releases, older than the
    last: what code needs and one of them had it was written for, whatever the base is.
    """
    more = [release for release in known if not any(same.version == release.version for same in (base, *against))]
    before = [ReleaseFacts(release) for release in more]
    readings = [_as_meant(reading, (base, *against), before) for reading in readings]
    uses = [use for reading in readings for use in reading.uses]
    pairs = [
        ReleasePair.of(before, release, uses, () if steps else more)
        for before, release in zip(_before(base, against, steps), against, strict=True)
    ]
    rows = tuple(row for reading in readings for use in reading.uses if (row := _row(reading, use, pairs)) is not None)
    judged = _whole_way(rows, ReleasePair.of(base, against[-1], uses, more)) if steps and against else rows
    ends = {base.version: base, **{release.version: release for release in against}}
    findings = [finding for reading in readings for finding in reading.unread]
    findings += [finding for row in judged for finding in reported(row, ends, more)]
    findings += [finding for reading in readings for release in against[-1:] for finding in refused(reading, release)]
    findings += [finding for use in uses if use.way == "add" for finding in misspelt(use, base)]
    return Report(
        packages=tuple(readings),
        base="" if steps else base.version,
        releases=tuple(release.version for release in against),
        rows=rows,
        findings=tuple(worst_first(_once(findings))),
    )


def _as_meant(reading: PackageUses, releases: Sequence[Release], before: Sequence[ReleaseFacts]) -> PackageUses:
    """The reading with each name parted where its module ends, and what is new on a class or module taken for added."""
    uses = [spelled(use, releases) for use in reading.uses]
    uses = [replace(use, way="add") if adds(use, releases[0], before) else use for use in uses]
    added = {use.name for use in uses if use.way == "add"}
    return replace(reading, uses=[use for use in uses if use.way != "import" or not _is_of(use, added)])


def _is_of(use: Use, added: Collection[str]) -> bool:
    """Whether a name that is read is one that the package itself puts there, or lies in it."""
    parts = use.qualname.split(".")
    return any(f"{use.module}:{'.'.join(parts[:count])}" in added for count in range(1, len(parts) + 1))


def _before(base: Release, against: Sequence[Release], steps: bool) -> list[Release]:
    return [base, *against[:-1]] if steps else [base for _ in against]


def _row(reading: PackageUses, use: Use, pairs: Sequence[ReleasePair]) -> ReportRow | None:
    """The row of a use; None where it is of no name of vLLM's in any of the releases."""
    cells = tuple(Cell(pair.new.version, pair.old.version, verdict(use, pair)) for pair in pairs)
    absent = bool(cells) and all(cell.verdict.state == "absent" for cell in cells)
    if absent and use.way not in ("call", "read"):
        had = use.way == "import" and any(located(release, use) for release in pairs[-1].known)
        added = use.way in ("add", "override") and (use.patch is None or has_owner(pairs[-1].new, use))
        from_elsewhere = is_dynamic if use.patch is None and use.way != "import" else may_inherit
        if added or (not had and any(from_elsewhere(release, use) for release in (pairs[-1].new, pairs[-1].old))):
            return None
    return ReportRow(reading.package, use, cells)


def _whole_way(rows: Iterable[ReportRow], pair: ReleasePair) -> list[ReportRow]:
    return [replace(row, cells=(Cell(pair.new.version, pair.old.version, verdict(row.use, pair)),)) for row in rows]


def verdict(use: Use, pair: ReleasePair) -> Verdict:
    """What became of a use, and whether its reason is gone."""
    if use.patch is not None and not is_for(use.patch.releases, pair.new.version):
        return Verdict("", f"this body is for {use.patch.releases}")
    found = pair.judge(use)
    if found.state in ("same", "absent") and any(vanished(use, pair.before, pair.new)):
        return Verdict("misfit", "its code reads what is gone", found.now)
    if found.state == "same" and (said := uncallable(use, pair.before, pair.new)[0]):
        return Verdict("misfit", said, found.now)
    if found.state in ("same", "body", "extended", "broken"):
        return _superfluous(use, pair) or found
    return found


def _superfluous(use: Use, pair: ReleasePair) -> Verdict | None:
    """Whether upstream has the package's own code now, or what its patch waits for has come."""
    waits = use.patch.remove_when if use.patch is not None else ""
    for stated in _VERSION.findall(waits):
        if includes(f">={stated}", pair.new.version):
            return Verdict("fixed", f"it is to be removed when: {waits}")
    if use.way != "replace" or not isinstance(use.body, Function):
        return None
    bare = type(use.body)(**{**{name: getattr(use.body, name) for name in use.body._fields}, "decorator_list": []})
    own = Fingerprint.of([bare]).body[:BODY]
    was, now = (release.shape(use.module, use.qualname) for release in (pair.old, pair.new))
    if now is not None and now.body == own and (was is None or was.body != own):
        return Verdict("fixed", "upstream has exactly this code now", now.name)
    return None


def _once(findings: Iterable[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))


def with_diffs(report: Report, text: Callable[[str, str, str], str | None]) -> Report:
    """The report with a diff in each cell whose name changed; ``text`` gives the source of a name in a release."""
    rows = [replace(row, cells=tuple(_with_diff(row.use, cell, text) for cell in row.cells)) for row in report.rows]
    return replace(report, rows=tuple(rows))


def _with_diff(use: Use, cell: Cell, text: Callable[[str, str, str], str | None]) -> Cell:
    import difflib

    if cell.verdict.state in ("same", "absent", "") or use.way in ("import", "call", "read"):
        return cell
    was = text(cell.since, use.module, use.qualname)
    module, _, qualname = cell.verdict.now.partition(":") if cell.verdict.now else (use.module, "", use.qualname)
    now = text(cell.release, module, qualname)
    if was is None and now is None:
        return cell
    lines = difflib.unified_diff(
        (was or "").splitlines(keepends=True),
        (now or "").splitlines(keepends=True),
        f"vLLM {cell.since}",
        f"vLLM {cell.release}",
    )
    return replace(cell, diff="".join(lines))


def modules_of(readings: Iterable[PackageUses]) -> list[str]:
    """The modules that an audit will ask for, so that a source far away can send them together."""
    names = [(use.module, use.qualname.split(".")) for reading in readings for use in reading.uses]
    # What is imported from a package may be a module, too.
    return list(
        dict.fromkeys(
            ".".join([module, *parts[:done]]).strip(".") for module, parts in names for done in range(len(parts) + 1)
        )
    )
