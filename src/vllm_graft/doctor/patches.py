"""The plan's patches, reviewed as ``vllm-graft plan`` does, in a child process.

What a patch changes shows only in its class, so the modules of planned patches are imported, in the child and nowhere
else. vLLM is not, unless such a module does it, or reading cannot tell whether a patch fits.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_graft.doctor import plans
from vllm_graft.doctor.processes import Ended, run
from vllm_graft.errors import ConfigError
from vllm_graft.findings import Finding
from vllm_graft.plan.patches import review
from vllm_graft.plan.plan import PlanItem
from vllm_graft.plan.resolution import fits, matches, model_names
from vllm_graft.points import POINTS, ROLES

if TYPE_CHECKING:
    from vllm_graft.doctor.facts import Facts

CODE: Final = "D035"

_IMPORT_S: Final = 60
"""Seconds that the import of one patch's module may take."""

_TRIAL_S: Final = 330
"""Seconds for one patch that has to be tried, an import of vLLM on a busy machine included."""


def findings(facts: Facts) -> list[Finding]:
    """Say of every planned patch what a start would; of one that only a trial can judge, not where a start follows."""
    items = plans.patches(facts)
    if not items or facts.vllm is None:
        return []
    told = facts.arguments
    trial = not facts.by_graft
    task = {
        "items": items,
        "names": model_names(told.model, told.values("--served-model-name")) if told.model else [],
        "strict": plans.strict(facts),
        "together": plans.together(facts),
        "trial": trial,
    }
    with tempfile.TemporaryDirectory(prefix="vllm-graft-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        home = str(Path(__file__).parents[2])
        code = f"import sys; sys.path[:0] = {list(facts.path)!r}; sys.path.append({home!r}); "
        code += f"from vllm_graft.doctor.patches import main; main({str(file)!r})"
        limit = len(items) * (_IMPORT_S + _TRIAL_S * trial)
        ended = run([sys.executable, "-P", "-c", code], facts.environ, limit)
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            report = {}
    if "findings" in report:
        return [Finding.from_dict(row) for row in report["findings"]]
    return [_unfinished(report.get("item") or items[0], ended)]


def _unfinished(item: Mapping[str, str], ended: Ended) -> Finding:
    """Say that the child ended while it imported a patch."""
    if ended.status is None or ended.signal == "SIGALRM":
        how = f"does not come to an end within {_IMPORT_S} s"
    else:
        how = f"is ended by {ended.signal}" if ended.signal else f"ends the process with status {ended.status}"
    last = f"; its last line: {ended.last_line}" if ended.last_line else ""
    fix = f"repair or reinstall {item['package']}, or take {item['name']!r} out of the plan"
    return Finding(CODE, "error", f"patch {item['name']}", f"importing it {how}{last}", item["origin"], fix)


def main(file: str) -> None:
    """Review the patches that a file names, and write the findings in its place; the child's part."""
    task = json.loads(Path(file).read_text(encoding="utf-8"))
    found: list[Finding] = []
    items: list[PlanItem] = []
    for row in task["items"]:
        Path(file).write_text(json.dumps({"item": row}), encoding="utf-8")
        signal.alarm(_IMPORT_S)
        try:
            if (item := _load(row, task["names"])) is not None:
                items.append(item)
        except ConfigError as error:
            found.append(Finding(CODE, "error", f"patch {row['name']}", error.what, row["origin"], error.fix))
        signal.alarm(0)
    try:
        found += review(items, strict=task["strict"], together=task["together"], trial=task["trial"])
    except ConfigError as error:
        found.append(Finding("D027", "error", "the plan", error.what, error.where, error.fix))
    Path(file).write_text(json.dumps({"findings": [each.as_dict() for each in found]}), encoding="utf-8")


def _load(row: Mapping[str, str], names: list[str]) -> PlanItem | None:
    """Load one planned patch; None where it is for other models, or ``*`` named it and it is no patch."""
    from vllm_graft.plan.catalogue import load

    (point,) = (each for each in POINTS if each.name == "patch")
    kind = load(row["target"], row["name"], row["package"])
    declaration = getattr(kind, "declaration", None)
    if not fits(kind, point) or declaration is None:
        # D027 has said so of one that is named; reading takes a class whose bases it cannot follow for a patch.
        return None
    if names and declaration.models and not matches(declaration.models, names):
        return None
    roles = tuple(role for role in ROLES if role in declaration.processes)
    return PlanItem("patch", row["name"], row["target"], row["package"], roles, {}, row["origin"])
