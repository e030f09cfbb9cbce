"""D035: a planned patch that cannot be imported; and what a start would say of those that can (P003, P006, P223)."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import patches
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding

CODE = patches.CODE
TITLE = "A planned patch that cannot be imported"


def check(facts: Facts) -> Iterator[Finding]:
    """Review the plan's patches in a child process; nothing is started where none is planned."""
    yield from patches.findings(facts)
