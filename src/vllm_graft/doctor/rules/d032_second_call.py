"""D032: a plugin whose function refuses to be called twice in a process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.modules import Module, definition, read
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
    """Told by the source: a flag of the module that the function sets, and raises on where it is set already."""
    for entry in facts.in_group(*GROUPS):
        module = read(entry.module, facts.path)
        found = definition(module, entry.attribute, facts.path) if isinstance(module, Module) else None
        holder, function = found if found is not None else (None, None)
        line = _refusal(function) if isinstance(function, ast.FunctionDef) else None
        if holder is None or line is None:
            continue
        yield Finding(
            CODE,
            "error" if entry.group == PLATFORMS and facts.loads(entry) else "warning",
            f"plugin {entry.name!r} of {entry.package}",
            f"{entry.value} raises when it is called a second time; {CONSEQUENCES[entry.group]}",
            f"{holder.file}:{line}",
            "return where everything is registered already, instead of raising",
        )


def _refusal(function: ast.FunctionDef) -> int | None:
    """The line that raises on a flag which the function itself sets; None where there is none."""
    if function.decorator_list:
        return None
    flags = {name for node in function.body if isinstance(node, ast.Global) for name in node.names}
    flags = {name for name in flags if _sets(function, name)}
    for node in function.body:
        if isinstance(node, ast.If) and _flag(node.test) in flags and isinstance(node.body[-1], ast.Raise):
            return node.body[-1].lineno
        if (
            isinstance(node, ast.Assert)
            and isinstance(node.test, ast.UnaryOp)
            and isinstance(node.test.op, ast.Not)
            and _flag(node.test.operand) in flags
        ):
            return node.lineno
    return None


def _flag(test: ast.expr) -> str:
    return test.id if isinstance(test, ast.Name) else ""


def _sets(function: ast.FunctionDef, name: str) -> bool:
    """Whether a function sets a name to True without a condition."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        for node in function.body
    )
