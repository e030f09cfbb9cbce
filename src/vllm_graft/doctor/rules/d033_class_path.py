"""D033: a platform or IO processor plugin that returns the path of a class that is not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor.environment import Environment
from vllm_graft.doctor.rules.d007_unresolvable import unbound
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.modules import Missing, SourceModule

CODE = "D033"
TITLE = "A plugin that names a class that is not there"

GROUPS: Final = {
    "vllm.platform_plugins": "vLLM stops in the middle of its import",
    "vllm.io_processor_plugins": "a server that uses it stops at its start",
}
"""Groups whose functions return the dotted path of a class, and what comes of a wrong one."""


def check(env: Environment) -> Iterator[Finding]:
    """Look up every path that a function returns as plain text."""
    for entry, module, function in env.functions(*GROUPS):
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                certain = node in function.body
                for path, sure in _texts(node.value, module, function):
                    home, dot, name = path.rpartition(".")
                    found = env.module(home) if dot else None
                    lacking = "" if dot else "that is not a dotted path"
                    if isinstance(found, Missing):
                        lacking = found.why
                    elif found is not None:
                        lacking = unbound(env, found, name)
                    if lacking:
                        level: Level = "error" if certain and sure and env.uses(entry) else "warning"
                        what = f"it returns {path!r}, and {lacking}; {GROUPS[entry.group]}"
                        fix = "return the dotted path of a class that can be imported"
                        yield Finding(CODE, level, entry.subject, what, f"{module.file.path}:{node.lineno}", fix)


def _texts(node: ast.expr, module: SourceModule, function: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """Yield the plain texts that an expression may be, each with whether it is the only one."""
    if isinstance(node, ast.IfExp):
        yield from ((text, False) for each in (node.body, node.orelse) for text, _ in _texts(each, module, function))
    elif isinstance(node, ast.BoolOp):
        yield from ((text, False) for each in node.values for text, _ in _texts(each, module, function))
    elif (text := _text(node, module, function)) is not None:
        yield text, True


def _text(node: ast.expr, module: SourceModule, function: ast.FunctionDef) -> str | None:
    """Return the text of an expression of constants, their names and concatenations; None for any other."""
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
        bound = module.namespace.only(node.id)
        only = bound if isinstance(bound, ast.Assign) else None
    return _text(only.value, module, function) if only is not None and _name(only.value) != node.id else None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
