"""D015: logits processors beside speculative decoding on the V1 runner, which drops them."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import engine
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding

CODE = "D015"
TITLE = "Logits processors and speculative decoding"


def check(facts: Facts) -> Iterator[Finding]:
    """The V1 runner builds its processors before it looks for those of installed packages, and says nothing of them."""
    if (
        facts.vllm is None
        or engine.generates(facts) is False
        or engine.speculative_method(facts) is None
        or engine.runner(facts) == "V2"
    ):
        return
    for entry in facts.in_group(engine.PROCESSORS):
        yield Finding(
            CODE,
            "warning",
            f"logits processor {entry.name!r}",
            "with speculative decoding the V1 runner does not load it, and does not say so",
            f"{entry.package}: {entry.value}",
            "start without speculative decoding, or do without the processor",
        )
    for name in engine.logits_processors(facts):
        yield Finding(
            CODE,
            "error" if engine.is_sure(facts) else "warning",
            f"logits processor {name}",
            "the V1 runner refuses to start with it and speculative decoding (ValueError)",
            "--logits-processors",
            "start without speculative decoding, or take it out of --logits-processors",
        )
