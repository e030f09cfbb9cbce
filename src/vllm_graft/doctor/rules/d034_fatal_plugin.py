"""D034: a general plugin that ends every process of vLLM that loads it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.modules import Module, definition, read
from vllm_graft.doctor.packages import Entry
from vllm_graft.findings import Finding
from vllm_graft.patching.upstream.scopes import dotted

CODE = "D034"
TITLE = "A plugin that ends every vLLM process"

GROUP: Final = "vllm.general_plugins"

_EXITS: Final = frozenset({"sys.exit", "os._exit", "os.abort", "exit", "quit"})
"""Calls after which nothing runs. vLLM catches no exception of a plugin's function, and no SystemExit of its import."""


def check(facts: Facts) -> Iterator[Finding]:
    """Told by the source, and only where no condition stands before it."""
    for entry in facts.in_group(GROUP):
        module = read(entry.module, facts.path)
        if not isinstance(module, Module):
            continue
        found = definition(module, entry.attribute, facts.path)
        function = found[1] if found is not None else None
        ending = _ending(module.tree.body, raises=False)
        where = module
        if ending is None and found is not None and isinstance(function, ast.FunctionDef):
            ending, where = _ending(function.body, raises=not function.decorator_list), found[0]
        if ending is not None:
            yield _finding(facts, entry, f"{where.file}:{ending.lineno}", ast.unparse(ending))


def _ending(body: Sequence[ast.stmt], *, raises: bool) -> ast.stmt | None:
    """The first statement of a body that ends the process and is reached whatever happens; None where there is none."""
    for node in body:
        if isinstance(node, ast.Return):
            return None
        if isinstance(node, ast.Raise):
            is_exit = node.exc is not None and dotted(_called(node.exc)) in ("SystemExit", "KeyboardInterrupt")
            return node if raises or is_exit else None
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in _EXITS:
            return node
        if any(isinstance(inner, ast.Return) for inner in ast.walk(node)) and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            return None
    return None


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _finding(facts: Facts, entry: Entry, where: str, statement: str) -> Finding:
    return Finding(
        CODE,
        "error" if facts.loads(entry) else "warning",
        f"plugin {entry.name!r} of {entry.package}",
        f"loading {entry.value} always comes to `{statement}`, which vLLM does not catch: every process stops, the "
        "command line included",
        where,
        f"take that out, leave the plugin out by VLLM_PLUGINS, or uninstall {entry.package}",
    )
