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


_DEEP: Final = 5
"""How many functions are followed that call one another."""


def check(facts: Facts) -> Iterator[Finding]:
    """Told by the source, and only where no condition stands before it."""
    for entry in facts.in_group(GROUP):
        module = read(entry.module, facts.path)
        if not isinstance(module, Module):
            continue
        ending = _ending(module, module.tree.body, facts.path, raises=False)
        found = definition(module, entry.attribute, facts.path) if ending is None else None
        if found is not None and isinstance(found[1], ast.FunctionDef):
            ending = _ending(found[0], found[1].body, facts.path, raises=not found[1].decorator_list)
        if ending is not None:
            where, node = ending
            yield _finding(facts, entry, f"{where.file}:{node.lineno}", ast.unparse(node))


def _ending(
    module: Module, body: Sequence[ast.stmt], path: Sequence[str], *, raises: bool, deep: int = _DEEP
) -> tuple[Module, ast.stmt] | None:
    """The first statement that ends the process and is reached whatever happens, be it in a function that is called."""
    for node in body:
        if isinstance(node, ast.Return):
            return None
        if isinstance(node, ast.Raise):
            is_exit = node.exc is not None and dotted(_called(node.exc)) in ("SystemExit", "KeyboardInterrupt")
            return (module, node) if raises or is_exit else None
        call = node.value if isinstance(node, ast.Expr | ast.Assign | ast.Return) else None
        if isinstance(call, ast.Call) and isinstance(node, ast.Expr) and dotted(call.func) in _EXITS:
            return module, node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and deep:
            called = definition(module, call.func.id, path)
            function = called[1] if called is not None else None
            if called is not None and isinstance(function, ast.FunctionDef) and not _is_lazy(function):
                inner = _ending(called[0], function.body, path, raises=raises, deep=deep - 1)
                if inner is not None:
                    return inner
        if any(isinstance(inner, ast.Return) for inner in ast.walk(node)) and not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ):
            return None
    return None


def _is_lazy(function: ast.FunctionDef) -> bool:
    """Whether a call may not run the body: a decorator may do without, and a generator waits."""
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    return bool(function.decorator_list) or yields


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
