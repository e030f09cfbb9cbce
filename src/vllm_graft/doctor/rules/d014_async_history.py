"""D014: logits processors of installed packages, which see -1 in the place of tokens under asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import engine, plans
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding

CODE = "D014"
TITLE = "A logits processor that does not see the sampled tokens"

_CURE: Final = "async-history"


def check(facts: Facts) -> Iterator[Finding]:
    """The V1 runner keeps the real tokens only for the processors of ``--logits-processors``: vLLM #52461."""
    if (
        facts.vllm is None
        or engine.generates(facts) is False
        or engine.runner(facts) == "V2"
        or not engine.is_asynchronous(facts)
    ):
        return
    if engine.logits_processors(facts) or engine.speculative_method(facts) is not None:
        return
    entries = [
        entry for entry in facts.in_group(engine.PROCESSORS) if facts.reading.is_a(entry, engine.V1_PROCESSOR) == "yes"
    ]
    if not entries or {_CURE, "*"} & plans.planned(facts).get("patches", set()):
        return
    for entry in entries:
        yield Finding(
            CODE,
            "warning",
            f"logits processor {entry.name!r}",
            "with asynchronous scheduling it sees -1 in the place of the tokens that were sampled (vLLM #52461)",
            f"{entry.package}: {entry.value}",
            f'plan the patch that ships with vllm-graft, patches = ["{_CURE}"], or start with --no-async-scheduling',
        )
