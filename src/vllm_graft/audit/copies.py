"""Functions of a package that were copied from vLLM: which release each was taken from, and how far behind it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from vllm_graft.audit.model import Report, Row
from vllm_graft.audit.provenance import Origin, nearest
from vllm_graft.findings import Finding

_SHORT: Final = 8
"""Functions of fewer lines are alike by chance."""


def copies(
    report: Report, releases: Sequence[str], text: Callable[[str, str, str], str | None]
) -> Iterator[tuple[Row, Origin, Finding]]:
    """Each copy with its origin among these releases, and what is to be said of it."""
    for row in report.rows:
        use = row.use
        if use.way not in ("replace", "override") or len(use.source.splitlines()) < _SHORT:
            continue
        upstream = {release: text(release, use.module, use.qualname) for release in releases}
        origin = nearest(use.source, {release: found for release, found in upstream.items() if found is not None})
        if origin.copied:
            yield row, origin, _finding(row, origin, report.releases[-1], upstream)


def _finding(row: Row, origin: Origin, newest: str, upstream: dict[str, str | None]) -> Finding:
    use = row.use
    behind = origin.release != newest and upstream.get(newest) != upstream.get(origin.release)
    what = f"it is a copy of {origin.release}'s: {origin.own} of its {origin.of_lines} lines are its own"
    if left_out := origin.differing - origin.own:
        what += f", {left_out} of upstream's {'is' if left_out == 1 else 'are'} left out"
    what += f"; what upstream changed until {newest} is not in it" if behind else ""
    fix = f"carry it over: vllm-graft rebase … --from {origin.release} --to {newest}" if behind else ""
    return Finding("P214", "warning" if behind else "info", f"{use.way} {use.name}", what, use.where, fix)
