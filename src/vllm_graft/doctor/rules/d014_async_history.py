"""D014: logits processors of installed packages, which see -1 in place of tokens under asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import plans, server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D014"
TITLE = "A logits processor that does not see the sampled tokens"

_CURE: Final = "async-history"


def check(env: Environment) -> Iterator[Finding]:
    """Find V1 processors of packages: only those of ``--logits-processors`` get the real tokens (vLLM #52461)."""
    if env.vllm is None or server.generates(env) is False or server.runner(env) == "V2":
        return
    if not server.is_asynchronous(env) or server.speculative_method(env) is not None:
        return
    if env.arguments.values("--logits-processors") or {_CURE, "*"} & plans.planned(env).get("patches", set()):
        return
    for entry in env.in_group(server.PROCESSORS):
        if env.classes.is_a(entry, server.V1_PROCESSOR) != "yes":
            continue
        what = "with asynchronous scheduling it sees -1 in place of the tokens that were sampled (vLLM #52461)"
        fix = f'plan the patch that ships with vllm-graft, patches = ["{_CURE}"], or start with --no-async-scheduling'
        yield Finding(CODE, "warning", f"logits processor {entry.name!r}", what, entry.origin, fix)
