"""D034: a general plugin that ends every process of vLLM that loads it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.finder import find_certain
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.modules import SourceModule
from vllm_graft.sources.scopes import dotted

CODE = "D034"
TITLE = "A plugin that ends every vLLM process"

GROUP: Final = "vllm.general_plugins"

_EXITS: Final = frozenset({"sys.exit", "os._exit", "os.abort", "exit", "quit"})
"""Calls after which nothing runs. vLLM catches no exception of a plugin's function, and no SystemExit of its import."""


_DEEP: Final = 5  # the number of functions that are followed where one calls another


def check(env: Environment) -> Iterator[Finding]:
    """Find an exit that no condition guards, in the module or in the function."""
    for entry in env.in_group(GROUP):
        module = env.module(entry.module)
        if not isinstance(module, SourceModule):
            continue
        ending = _ending(module, module.body, env.path, raises=False)
        found = env.definition(entry) if ending is None else None
        if found is not None and isinstance(found[1], ast.FunctionDef):
            ending = _ending(found[0], found[1].body, env.path, raises=not found[1].decorator_list)
        if ending is not None:
            holder, node = ending
            what = (
                f"loading {entry.value} always comes to `{ast.unparse(node)}`, which vLLM does not catch: "
                "every process stops, the command line included"
            )
            fix = f"take that out, leave the plugin out by VLLM_PLUGINS, or uninstall {entry.package}"
            level: Level = "error" if env.loads(entry) else "warning"
            yield Finding(CODE, level, entry.subject, what, f"{holder.file.path}:{node.lineno}", fix)


def _ending(
    module: SourceModule, body: Sequence[ast.stmt], path: Sequence[str], *, raises: bool, deep: int = _DEEP
) -> tuple[SourceModule, ast.stmt] | None:
    """Return the first statement that always ends the process, be it in a function that is called."""
    for node in body:
        if isinstance(node, ast.Return):
            return None
        if isinstance(node, ast.Raise):
            exception = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            is_exit = exception is not None and dotted(exception) in ("SystemExit", "KeyboardInterrupt")
            return (module, node) if raises or is_exit else None
        call = node.value if isinstance(node, ast.Expr | ast.Assign | ast.Return) else None
        if isinstance(call, ast.Call) and isinstance(node, ast.Expr) and dotted(call.func) in _EXITS:
            return module, node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and deep:
            called = find_certain(module, call.func.id, path)
            function = called[1] if called is not None else None
            runs = isinstance(function, ast.FunctionDef) and not (
                # A decorator may skip the body, and a generator waits with it.
                function.decorator_list or any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(function))
            )
            if called is not None and isinstance(function, ast.FunctionDef) and runs:
                inner = _ending(called[0], function.body, path, raises=raises, deep=deep - 1)
                if inner is not None:
                    return inner
        if any(isinstance(inner, ast.Return) for inner in ast.walk(node)) and not isinstance(
            node, Function | ast.ClassDef
        ):
            return None
    return None
