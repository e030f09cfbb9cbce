"""D027: a plan that vllm-graft would refuse."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import plans
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding
from vllm_graft.switches import disabled

CODE = "D027"
TITLE = "A fault in the plan"


def check(env: Environment) -> Iterator[Finding]:
    """Check the file, names and options; classes are read, not imported. ``vllm-graft plan`` checks the rest."""
    if disabled(env.variables):
        return
    for error in plans.problems(env):
        yield Finding(CODE, "error", "the plan", error.what, error.where, error.fix)
    yield from plans.undecided_patches(env)
