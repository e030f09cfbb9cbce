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
        holder, function = found if found is not None else (None, None)
        if holder is None or not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                certain = node in function.body
                for path, sure in _texts(node.value, holder, function):
                    yield from _look_up(facts, entry, path, f"{holder.file}:{node.lineno}", certain and sure)


def _texts(node: ast.expr, module: Module, function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """The plain texts that an expression may be, each with whether it can be no other."""
    if isinstance(node, ast.IfExp):
        yield from ((text, False) for each in (node.body, node.orelse) for text, _ in _texts(each, module, function))
    elif isinstance(node, ast.BoolOp):
        yield from ((text, False) for each in node.values for text, _ in _texts(each, module, function))
    elif (text := _text(node, module, function)) is not None:
        yield text, True


def _text(node: ast.expr, module: Module, function: ast.FunctionDef) -> str | None:
    """The text that an expression is: a constant by its name too, and texts put together."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr | ast.BinOp):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add):
            return None
        plain = [each.value if isinstance(each, ast.FormattedValue) else each for each in parts]
        texts = [_text(each, module, function) for each in plain]
        return None if None in texts else "".join(filter(None, texts))
    if not isinstance(node, ast.Name):
        return None
    if node.id == "__name__":
        return module.name
    stores = [each for each in ast.walk(function) if isinstance(each, ast.Name) and each.id == node.id]
    if any(isinstance(each.ctx, ast.Store) for each in stores):
        own = [each for each in function.body if isinstance(each, ast.Assign) and node.id in map(_name, each.targets)]
        only = own[0] if len(own) == 1 and sum(isinstance(each.ctx, ast.Store) for each in stores) == 1 else None
    else:
        bound = module.only(node.id)
        only = bound if isinstance(bound, ast.Assign) else None
    return _text(only.value, module, function) if only is not None and _name(only.value) != node.id else None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


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
