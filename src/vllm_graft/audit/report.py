"""The audit itself: every use of every package, in every release that was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from vllm_graft.audit.compatibility import find_unsupported_call, vanished_attributes
from vllm_graft.audit.findings import findings_for, is_for, misspellings, start_refusals
from vllm_graft.audit.model import PackageUses, Report, ReportCell, ReportRow, Use, Verdict
from vllm_graft.audit.releases.outline import BODY
from vllm_graft.audit.releases.release import Release
from vllm_graft.audit.releases.release_finder import is_older
from vllm_graft.audit.verdicts import (
    ReleaseFacts,
    ReleasePair,
    adds,
    find_owner,
    find_shape,
    is_dynamic,
    may_inherit,
    normalize,
)
from vllm_graft.findings import worst_first
from vllm_graft.sources.fingerprint import Fingerprint, Function
from vllm_graft.versions import includes

_VERSION: Final = re.compile(r"(?<![\w.#])(\d+\.\d+(?:\.\d+)?)(?![\w.])")


def audit(
    packages: Sequence[PackageUses],
    base: Release,
    against: Sequence[Release],
    *,
    steps: bool = False,
    known: Sequence[Release] = (),
) -> Report:
    """Judge the uses of packages in releases.

    Each release is compared with ``base``; with ``steps`` with the one before it, ``base`` being before the first.
    Findings compare the last release with the base either way. ``known`` are more releases, older than the last: code
    that needs something that only one of them had was written for that release, whatever the base is.
    """
    more = [release for release in known if not any(same.version == release.version for same in (base, *against))]
    facts = [ReleaseFacts(release) for release in more]
    packages = [_normalize(package, (base, *against), facts) for package in packages]
    uses = [use for package in packages for use in package.uses]
    olds = [base, *against[:-1]] if steps else [base for _ in against]
    # Code for a release was not written for a later one, although ``known`` may have some before the last.
    earlier = {new.version: [one for one in more if is_older(one.version, new.version)] for new in against}
    pairs = [
        ReleasePair.of(old, new, uses, () if steps else earlier[new.version])
        for old, new in zip(olds, against, strict=True)
    ]
    rows = [row for package in packages for use in package.uses if (row := _row(package, use, pairs)) is not None]
    judged = rows
    if steps and against:
        whole = ReleasePair.of(base, against[-1], uses, earlier[against[-1].version])
        cells = (ReportCell(whole.new.version, whole.old.version, verdict(row.use, whole)) for row in rows)
        judged = [replace(row, cells=(cell,)) for row, cell in zip(rows, cells, strict=True)]
    ends = {base.version: base, **{release.version: release for release in against}}
    findings = [finding for package in packages for finding in package.unread]
    findings += [finding for row in judged for finding in findings_for(row, ends, earlier)]
    for release in against[-1:] if steps else against:
        findings += [finding for package in packages for finding in start_refusals(package, release)]
    findings += [finding for use in uses if use.way == "add" for finding in misspellings(use, base)]
    return Report(
        packages=tuple(packages),
        base="" if steps else base.version,
        releases=tuple(release.version for release in against),
        rows=tuple(rows),
        findings=tuple(worst_first(dict.fromkeys(findings))),
    )


def _normalize(package: PackageUses, releases: Sequence[Release], known: Sequence[ReleaseFacts]) -> PackageUses:
    """Split each name where its module ends, tell additions from replacements, and drop imports of added names."""
    pairs = [(use, normalize(use, releases)) for use in package.uses]
    # A name that is mentioned with what it has, too: ``function`` and ``function.cache_clear``.
    whole = {(one.file, one.name, one.guard, one.passed_on) for use, one in pairs if not _is_cut(use, one)}
    uses = [
        one
        for use, one in pairs
        if not _is_cut(use, one) or (one.file, one.name, one.guard, one.passed_on) not in whole
    ]
    base = ReleaseFacts(releases[0])
    uses = [replace(use, way="add") if adds(use, base, known) else use for use in uses]
    added = {use.name for use in uses if use.way == "add"}
    modules = {use.module for use in uses if use.way == "add" and not use.qualname}
    # A module that vLLM has is replaced only once that code has run, which is certain below it in its own file.
    at_top = (use for use in uses if use.way == "replace" and not (use.qualname or use.owner or use.guard))
    replaced = {(use.file, use.module): use.line for use in at_top}

    def is_own(use: Use) -> bool:
        """Return whether the package itself adds a name, or something around it."""
        parts = use.qualname.split(".")
        if use.module in modules or replaced.get((use.file, use.module), use.line) < use.line:
            # ``sys.modules["vllm.x"] = ...``
            return True
        return any(f"{use.module}:{'.'.join(parts[:count])}" in added for count in range(1, len(parts) + 1))

    return replace(package, uses=[use for use in uses if use.way != "import" or not is_own(use)])


def _is_cut(use: Use, normal: Use) -> bool:
    """Return whether a use lost the end of its name, which no source shows."""
    return normal is not use and len(use.name) > len(normal.name)


def _row(package: PackageUses, use: Use, pairs: Sequence[ReleasePair]) -> ReportRow | None:
    """Judge a use in each release; None if none of them has its name."""
    cells = tuple(ReportCell(pair.new.version, pair.old.version, verdict(use, pair)) for pair in pairs)
    absent = bool(cells) and all(cell.verdict.state == "absent" for cell in cells)
    if absent and use.way not in ("call", "read"):
        last = pairs[-1]
        if use.guessed:
            # A star import does not say that its module has the name: something else may bind it.
            return None
        had = use.way == "import" and any(find_shape(release, use) for release in last.known)
        added = use.way in ("add", "override") and (use.patch is None or find_owner(last.new, use) is not None)
        from_elsewhere = is_dynamic if use.patch is None and use.way != "import" else may_inherit
        if added or (not had and any(from_elsewhere(release, use) for release in (last.new, last.old))):
            return None
    return ReportRow(package.package, use, cells)


def verdict(use: Use, pair: ReleasePair) -> Verdict:
    """Judge a use, and whether upstream has made it superfluous."""
    if use.patch is not None and not is_for(use.patch.releases, pair.new.version):
        return Verdict("", f"this body is for {use.patch.releases}")
    found = pair.judge(use)
    if found.state in ("same", "absent") and any(vanished_attributes(use, pair.before, pair.new)):
        return replace(found, state="misfit", detail="its code reads what is gone")
    if found.state == "same" and (said := find_unsupported_call(use, pair.before, pair.new)[0]):
        return replace(found, state="misfit", detail=said)
    if found.state not in ("same", "body", "extended", "broken"):
        return found
    waits = use.patch.remove_when if use.patch is not None else ""
    for stated in _VERSION.findall(waits):
        if includes(f">={stated}", pair.new.version):
            return Verdict("fixed", f"it is to be removed when: {waits}")
    if use.way == "replace" and isinstance(use.body, Function):
        fields = {name: getattr(use.body, name) for name in use.body._fields}
        own = Fingerprint.of([type(use.body)(**{**fields, "decorator_list": []})]).body[:BODY]
        was, now = (release.shape(use.module, use.qualname) for release in (pair.old, pair.new))
        if now is not None and now.body == own and (was is None or was.body != own):
            return Verdict("fixed", "upstream has exactly this code now", now.name)
    return found


def with_diffs(report: Report, text: Callable[[str, str, str], str | None]) -> Report:
    """Add a diff to each cell whose name changed; ``text`` returns the source of a name in a release."""
    import difflib

    def with_diff(use: Use, cell: ReportCell) -> ReportCell:
        if cell.verdict.state in ("same", "absent", "") or use.way in ("import", "call", "read"):
            return cell
        module, _, qualname = cell.verdict.now.partition(":") if cell.verdict.now else (use.module, "", use.qualname)
        was, now = text(cell.since, use.module, use.qualname), text(cell.release, module, qualname)
        if was is None and now is None:
            return cell
        old, new = ((each or "").splitlines(keepends=True) for each in (was, now))
        return replace(cell, diff="".join(difflib.unified_diff(old, new, f"vLLM {cell.since}", f"vLLM {cell.release}")))

    rows = [replace(row, cells=tuple(with_diff(row.use, cell) for cell in row.cells)) for row in report.rows]
    return replace(report, rows=tuple(rows))


def modules_of(packages: Iterable[PackageUses]) -> list[str]:
    """List the modules that an audit will read, so that a remote source can fetch them together."""
    names = [(use.module, use.qualname.split(".")) for package in packages for use in package.uses]
    # A name that is imported from a package may be a module, too.
    paths = (".".join([module, *parts[:done]]) for module, parts in names for done in range(len(parts) + 1))
    return list(dict.fromkeys(path.strip(".") for path in paths))
