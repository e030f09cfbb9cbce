"""D027: a plan that vllm-graft would refuse."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import plans
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding

CODE = "D027"
TITLE = "A fault in the plan"


def check(facts: Facts) -> Iterator[Finding]:
    """The file's form, the names, the options; classes are read, not imported. ``vllm-graft plan`` sees the rest."""
    if plans.disabled(facts):
        return
    for error in plans.problems(facts):
        yield Finding(CODE, "error", "the plan", error.what, error.where, error.fix)
    yield from plans.undecided_patches(facts)
