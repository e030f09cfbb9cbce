"""A plan's patches reviewed against the installed vLLM: what a start would refuse or warn of, without importing vLLM.

``vllm-graft plan`` and ``vllm-graft doctor`` share it, so that they agree with each other and with the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_graft.errors import PatchError
from vllm_graft.findings import Finding, Level
from vllm_graft.patching.declaration import Patch, as_patch
from vllm_graft.patching.dry_run import try_in_child
from vllm_graft.patching.review import Reviewer
from vllm_graft.plan.catalogue import load
from vllm_graft.plan.plan import PlanItem


def review(items: Sequence[PlanItem], *, strict: bool, together: bool = True, trial: bool = True) -> list[Finding]:
    """Review each patch, and each beside those before it; the patches' own modules are imported here.

    ``together`` says that one server has all of them. ``trial`` applies a patch that reading cannot judge in a process
    of its own, which takes as long as an import of vLLM.
    """
    found: list[Finding] = []
    level: Level = "error" if strict else "warning"
    reviewer = Reviewer()
    accepted: list[tuple[PlanItem, Patch]] = []
    for item in items:
        try:
            patch = as_patch(load(item.target, item.name, item.package))
            beneath = [(one, other) for one, other in accepted if {*item.roles} <= {*one.roles}]
            notes, sure = reviewer.examine(patch, [other for _, other in beneath])
            # A process applies the patches of its role alone.
            beside = [other for one, other in accepted if together and {*one.roles} & {*item.roles}]
            reviewer.check_beside(patch, beside)
        except PatchError as error:
            found.append(Finding("P003", level, f"patch {item.name}", error.what, item.origin, error.fix))
            continue
        try:
            # The worker of a single device lives in engine core's process.
            shared = {"engine", "worker"} & {*item.roles}
            beside = [other for one, other in accepted if together and shared and {"engine", "worker"} & {*one.roles}]
            reviewer.check_beside(patch, beside)
        except PatchError as error:
            what = f"{error.what}; with one device, engine core and its worker are one process"
            found.append(Finding("P003", "warning", f"patch {item.name}", what, item.origin, error.fix))
        accepted.append((item, patch))
        if trial and not sure:
            module = patch.declaration.target.module
            near = [one.target for one, other in beneath if other.declaration.target.module == module]
            tried = try_in_child(item.target, near)
            if tried.what:
                found.append(Finding("P003", level, f"patch {item.name}", tried.what, item.origin, tried.fix))
            elif tried.failed:
                what = f"whether a start would accept it cannot be determined here: {tried.failed}"
                fix = "run `vllm-graft plan` where the server runs"
                found.append(Finding("P223", "warning", f"patch {item.name}", what, item.origin, fix))
        fix = f"see `vllm-graft diff {item.name}`"
        found += [Finding("P006", "warning", f"patch {item.name}", note, item.origin, fix) for note in notes]
    return found
