"""D033: a platform or IO processor plugin that returns the path of a class that is not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.modules import Missing, Module, definition, read
from vllm_graft.doctor.packages import Entry
from vllm_graft.errors import nearest
from vllm_graft.findings import Finding

CODE = "D033"
TITLE = "A plugin that names a class that is not there"

GROUPS: Final = {
    "vllm.platform_plugins": "vLLM stops in the middle of its import",
    "vllm.io_processor_plugins": "a server that uses it stops at its start",
}
"""Groups whose functions return the dotted path of a class, and what comes of a wrong one."""


def check(facts: Facts) -> Iterator[Finding]:
    """Look up every path that a function returns as plain text."""
    for entry in facts.in_group(*GROUPS):
        module = read(entry.module, facts.path)
        found = definition(module, entry.attribute, facts.path) if isinstance(module, Module) else None
        if found is None or not isinstance(found[1], ast.FunctionDef):
            continue
        for node in ast.walk(found[1]):
            path = node.value if isinstance(node, ast.Return) else None
            if isinstance(path, ast.Constant) and isinstance(path.value, str):
                yield from _look_up(facts, entry, path.value, f"{found[0].file}:{path.lineno}", node in found[1].body)


def _look_up(facts: Facts, entry: Entry, path: str, where: str, certain: bool) -> Iterator[Finding]:
    lacking = _lacking(facts, path)
    if not lacking:
        return
    yield Finding(
        CODE,
        "error" if certain and facts.uses(entry) else "warning",
        f"plugin {entry.name!r} of {entry.package}",
        f"it returns {path!r}, and {lacking}; {GROUPS[entry.group]}",
        where,
        "return the dotted path of a class that can be imported",
    )


def _lacking(facts: Facts, path: str) -> str:
    """What is missing of a path, in words; empty where nothing is, or where reading does not tell."""
    module, dot, name = path.rpartition(".")
    if not dot:
        return "that is no dotted path"
    found = read(module, facts.path)
    if isinstance(found, Missing):
        return found.why
    if found is None or not found.closed or name in found.bound:
        return ""
    if found.is_package and not isinstance(read(path, facts.path), Missing):
        return ""
    public = [each for each in found.bound if not each.startswith("_")]
    return f"{found.file} binds no {name!r}{nearest(name, public)}"
