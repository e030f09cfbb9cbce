"""D032: a plugin whose function refuses to be called twice in a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor.environment import Environment
from vllm_graft.doctor.interpreter import raises_when_called_again
from vllm_graft.doctor.server import PLATFORMS
from vllm_graft.findings import Finding, Level

CODE = "D032"
TITLE = "A plugin that refuses a second call"


# resolve_current_platform_cls_qualname calls all plugins, and the one that answered once more for its class.
CONSEQUENCES: Final = {
    PLATFORMS: "vLLM calls the function of a platform plugin twice in every process, so it does not start",
    "vllm.general_plugins": "vLLM may load general plugins several times, and expects this to be harmless: a program "
    "that loads them itself, or a test, stops there",
}
"""The consequence of a second call that fails, by group."""


def check(env: Environment) -> Iterator[Finding]:
    """Follow the flags that a function sets, and find one on which it raises when it is set already."""
    for entry, module, function in env.functions(*CONSEQUENCES):
        raising = raises_when_called_again(module.tree, function)
        if raising is not None:
            what = f"{entry.value} raises when it is called a second time; {CONSEQUENCES[entry.group]}"
            fix = "return if everything is already registered, instead of raising"
            level: Level = "error" if entry.group == PLATFORMS and env.loads(entry) else "warning"
            yield Finding(CODE, level, entry.subject, what, f"{module.file.path}:{raising.lineno}", fix)
