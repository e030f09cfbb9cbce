"""D006: two groups that do not treat ``VLLM_PLUGINS`` as the others do."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D006"
TITLE = "Groups that do not obey VLLM_PLUGINS as the others do"


def check(env: Environment) -> Iterator[Finding]:
    """Find logits processors, which load whatever the list says, and endpoint plugins that no list names."""
    for entry in env.in_group("vllm.endpoint_plugins") if env.allowed is None else ():
        # The list that lets it in shuts out all that it does not name.
        wanted = [each.name for each in env.plugins if env.loads(each) and each.group != "vllm.logits_processors"]
        what = "is not loaded: VLLM_PLUGINS is not set, and endpoint plugins load only when it names them"
        fix = f"set VLLM_PLUGINS={','.join(dict.fromkeys([*wanted, entry.name]))}, which keeps the others on"
        yield Finding(CODE, "warning", entry.subject, what, "VLLM_PLUGINS", fix)
    for entry in env.in_group("vllm.logits_processors"):
        if env.allowed is not None and entry.name not in env.allowed:
            what = f"VLLM_PLUGINS does not list it, but vLLM loads it anyway: the list does not apply to {entry.group}"
            fix = f"uninstall {entry.package} if it is not wanted"
            yield Finding(CODE, "warning", entry.subject, what, entry.where, fix)
