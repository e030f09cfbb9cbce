"""Functions that a package copied from vLLM: the release each was taken from, and how far behind it is.

The origin is the release whose function has the fewest differing lines. Lines are compared in the form that
``ast.unparse`` gives them, without docstrings, annotations, decorators and the function's own name, so that neither a
formatter nor a patch's mark makes a copy look like something else.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from packaging.version import InvalidVersion, Version

from vllm_graft.audit.model import Report, ReportRow, Use
from vllm_graft.findings import Finding
from vllm_graft.sources.fingerprint import Function

# Functions of fewer lines are alike by chance.
_SHORT: Final = 8
_COMMONPLACE: Final = re.compile(r"\s*(?:pass|break|continue|return|return None|raise|\.\.\.|(?:else|try|finally):)")


@dataclass(frozen=True, slots=True)
class Origin:
    """The release that a function seems to be copied from.

    release:    the nearest; empty if there was none to compare with
    differing:  how many lines are in one of the two and not in the other
    of_lines:   how many lines the function has
    own:        how many of its lines upstream's function does not have; the rest of ``differing`` are upstream's that
                it does not have
    others:     the differing lines of every other release
    copied:     whether it is a copy at all: leaving out the signature and lines that occur in any function, such as
                ``else:`` or ``return``, more lines of the two are common to both than differ
    """

    release: str
    differing: int
    of_lines: int
    others: Mapping[str, int] = field(default_factory=dict)
    copied: bool = False
    own: int = 0


def nearest_release(text: str, candidates: Mapping[str, str], *, prefer_old: bool = False) -> Origin:
    """Find the release among ``candidates`` (release to upstream's source) that ``text`` is nearest to.

    Of those equally near it is the newest. With ``prefer_old`` it is the oldest, for a merge: if function and
    upstream have both changed one line, either release may be the origin, and an older base shows a conflict where a
    newer one would hide upstream's change.
    """
    own = canonical_lines(text)
    texts = {release: canonical_lines(source) for release, source in candidates.items()}
    distances = {release: _differing(own, text) for release, text in texts.items()}
    if not distances:
        return Origin("", 0, len(own))
    best = min(sorted(distances, key=_version, reverse=not prefer_old), key=distances.__getitem__)
    telling = [[line for line in each[1:] if not _COMMONPLACE.fullmatch(line)] for each in (own, texts[best])]
    return Origin(
        release=best,
        differing=distances[best],
        of_lines=len(own),
        others={release: count for release, count in distances.items() if release != best},
        copied=2 * _common(*telling) > _differing(*telling),
        own=len(own) - _common(own, texts[best]),
    )


def oldest(releases: Iterable[str]) -> str:
    """Return the first of some releases."""
    return min(releases, key=_version)


def canonical_lines(text: str) -> list[str]:
    """Return the lines of one or several functions that count; SyntaxError if it is not Python."""
    body = statements(text)
    for node in body:
        if isinstance(node, Function):
            node.name, node.decorator_list = "_", []
    tree = ast.Module(body=[_Bare().visit(node) for node in body], type_ignores=[])
    return ast.unparse(ast.fix_missing_locations(tree)).splitlines()


def statements(text: str) -> list[ast.stmt]:
    """Return the statements of a piece of source that may be indented as a whole."""
    if not text.lstrip("\r\n")[:1].isspace():
        return ast.parse(text).body
    (block,) = ast.parse(f"if True:\n{text}").body
    return block.body if isinstance(block, ast.If) else [block]


class _Bare(ast.NodeTransformer):
    """Removes what does not count."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=self.visit(node.value), lineno=node.lineno)

    def visit_FunctionDef(self, node: Function) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        node.returns = None
        if hasattr(node, "type_params"):
            node.type_params = []
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _differing(one: Sequence[str], other: Sequence[str]) -> int:
    return len(one) + len(other) - 2 * _common(one, other)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    if one == other:
        return len(one)
    return sum(block.size for block in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks())


def _version(release: str) -> Version:
    try:
        return Version(release)
    except InvalidVersion:
        return Version("0.dev0")


def copies(
    report: Report, releases: Sequence[str], text: Callable[[str, str, str], str | None]
) -> Iterator[tuple[ReportRow, Origin, Finding]]:
    """Yield each copy with its origin among these releases, and the finding on it."""
    for row in report.rows:
        use = row.use
        if use.way not in ("replace", "override") or len(use.source.splitlines()) < _SHORT:
            continue
        upstream = {release: text(release, use.module, use.qualname) for release in releases}
        origin = nearest_release(
            use.source, {release: found for release, found in upstream.items() if found is not None}
        )
        if origin.copied:
            yield row, origin, _finding(use, origin, report.releases[-1], upstream)


def _finding(use: Use, origin: Origin, newest: str, upstream: dict[str, str | None]) -> Finding:
    behind = origin.release != newest and upstream.get(newest) != upstream.get(origin.release)
    what = f"it is a copy of {origin.release}'s: {origin.own} of its {origin.of_lines} lines are its own"
    if left_out := origin.differing - origin.own:
        what += f", {left_out} of upstream's {'is' if left_out == 1 else 'are'} left out"
    what += f"; what upstream changed until {newest} is not in it" if behind else ""
    fix = f"carry it over: vllm-graft rebase … --from {origin.release} --to {newest}" if behind else ""
    return Finding("P214", "warning" if behind else "info", f"{use.way} {use.name}", what, use.where, fix)
