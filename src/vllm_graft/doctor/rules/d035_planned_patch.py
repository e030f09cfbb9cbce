"""D035: a planned patch that cannot be imported; and what a start would say of those that can (P003, P006, P223).

The patches are reviewed as ``vllm-graft plan`` does. What a patch changes shows only in its class, so the modules of
planned patches are imported, in a child process and nowhere else. vLLM is not, unless such a module imports it, or
reading cannot tell whether a patch fits.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_graft.doctor import plans
from vllm_graft.doctor.child_process import run_task
from vllm_graft.errors import ConfigError
from vllm_graft.findings import Finding
from vllm_graft.plan.patch_review import review
from vllm_graft.plan.plan import PlanItem
from vllm_graft.plan.resolution import fits, matches, model_names
from vllm_graft.points import POINTS, ROLES

if TYPE_CHECKING:
    from vllm_graft.doctor.environment import Environment

CODE = "D035"
TITLE = "A planned patch that cannot be imported"

_IMPORT_S: Final = 60  # the time limit for importing one patch's module, in seconds
_TRIAL_S: Final = 330  # the time limit for trying one patch, with an import of vLLM on a busy machine, in seconds


def check(env: Environment) -> list[Finding]:
    """Review every planned patch; one that reading cannot judge is tried in a process unless a start follows."""
    items = plans.patches(env)
    if not items or env.vllm is None:
        return []
    arguments = env.arguments
    trial = not env.by_graft
    task = {
        "items": items,
        "names": model_names(arguments.model, arguments.values("--served-model-name")) if arguments.model else [],
        "strict": plans.strict(env),
        "together": plans.together(env),
        "trial": trial,
    }
    home = str(Path(__file__).parents[3])
    code = f"import sys; sys.path[:0] = {list(env.path)!r}; sys.path.append({home!r}); "
    code += f"from {__name__} import main; main(sys.argv[1])"
    limit = len(items) * (_IMPORT_S + _TRIAL_S * trial)
    ended, report = run_task([sys.executable, "-P", "-c", code], task, env.variables, limit)
    if "findings" in report:
        return [Finding.from_dict(row) for row in report["findings"]]
    # The child ended while it imported a patch.
    item = report.get("item") or items[0]
    timed_out = ended.status is None or ended.signal == "SIGALRM"
    how = f"does not come to an end within {_IMPORT_S} s" if timed_out else ended.describe()
    last = f"; its last line: {ended.last_line}" if ended.last_line else ""
    fix = f"repair or reinstall {item['package']}, or remove {item['name']!r} from the plan"
    return [Finding(CODE, "error", f"patch {item['name']}", f"importing it {how}{last}", item["origin"], fix)]


def main(file: str) -> None:
    """Review the patches that a file names, in the child, and write the findings in its place."""
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
    """Load one planned patch; None if it is for other models, or ``*`` named it and it is not a patch."""
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
