"""D015: logits processors beside speculative decoding on the V1 runner, which drops them."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D015"
TITLE = "Logits processors and speculative decoding"


def check(env: Environment) -> Iterator[Finding]:
    """Find processors beside drafting: the V1 runner silently drops those of packages, and refuses named ones."""
    if env.vllm is None or server.generates(env) is False:
        return
    if server.speculative_method(env) is None or server.runner(env) == "V2":
        return
    for processor in server.processors(env):
        if processor.is_installed:
            what = "with speculative decoding the V1 runner silently does not load it"
            fix = "start without speculative decoding, or do without the processor"
            yield processor.finding(CODE, "warning", what, fix)
        else:
            what = "the V1 runner refuses to start with it and speculative decoding (ValueError)"
            fix = f"start without speculative decoding, or {processor.removal}"
            yield processor.finding(CODE, "error" if server.is_sure(env) else "warning", what, fix)
