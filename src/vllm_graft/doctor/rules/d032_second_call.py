"""D032: a plugin whose function refuses to be called twice in a process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.modules import Module, definition, read
from vllm_graft.doctor.twice import refusal
from vllm_graft.findings import Finding

CODE = "D032"
TITLE = "A plugin that refuses a second call"

PLATFORMS: Final = "vllm.platform_plugins"
GROUPS: Final = ("vllm.general_plugins", PLATFORMS)

CONSEQUENCES: Final = {
    PLATFORMS: "vLLM calls the function of a platform plugin twice in every process, so it does not start",
    "vllm.general_plugins": "vLLM may load general plugins several times, and asks that this does no harm: a program "
    "that loads them itself, or a test, stops there",
}
"""What comes of a second call that fails, by group."""


def check(facts: Facts) -> Iterator[Finding]:
    """Told by the source: a flag that the function sets, and raises on where it is set already."""
    for entry in facts.in_group(*GROUPS):
        module = read(entry.module, facts.path)
        found = definition(module, entry.attribute, facts.path) if isinstance(module, Module) else None
        holder, function = found if found is not None else (None, None)
        if holder is None or not isinstance(function, ast.FunctionDef):
            continue
        raising = refusal(holder.tree, function)
        if raising is None:
            continue
        yield Finding(
            CODE,
            "error" if entry.group == PLATFORMS and facts.loads(entry) else "warning",
            f"plugin {entry.name!r} of {entry.package}",
            f"{entry.value} raises when it is called a second time; {CONSEQUENCES[entry.group]}",
            f"{holder.file}:{raising.lineno}",
            "return where everything is registered already, instead of raising",
        )
