"""D012: an entry point of the wrong kind: a class where a function is called, or the other way round."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import EntryPoint, Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.patching.functions import kind_in_source
from vllm_graft.sources.finder import find_certain
from vllm_graft.sources.fingerprint import Function, each_parameter
from vllm_graft.sources.modules import SourceModule

CODE = "D012"
TITLE = "An entry point of the wrong kind"

_CLASSES: Final = {
    "vllm.stat_logger_plugins": "the server stops at its start with a TypeError",
    "vllm.logits_processors": "the engine stops at its start, or fails with the first request",
}
"""Groups that need a class, and the consequence of anything else."""

_CALLED: Final = {
    "vllm.general_plugins": "every vLLM process, the command line included, stops with what the call raises",
    "vllm.platform_plugins": "vLLM skips it, with one line at DEBUG at most, and takes another platform",
    "vllm.io_processor_plugins": "vLLM logs a warning and says that the plugin is not installed",
    "vllm.endpoint_plugins": "vLLM logs a traceback and serves without it",
}
"""Groups whose entry points are called without arguments, and the consequence of one that cannot be."""

_NAMING: Final = {
    "vllm.platform_plugins": "vLLM stops at its start when it looks the platform up by what the call returns",
    "vllm.io_processor_plugins": "vLLM stops at its start when it looks the processor up by what the call returns",
}
"""Groups whose call must return the dotted name of a class, and the consequence of an object."""

_VALUES = (ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.JoinedStr)


def check(env: Environment) -> Iterator[Finding]:
    """Judge by the source, and only if it leaves no doubt."""
    for entry in env.in_group(*_CLASSES, *_CALLED):
        module = env.module(entry.module)
        if not isinstance(module, SourceModule):
            continue
        fault = _fault(entry, env)
        if fault:
            is_what, then, fix = fault
            what = f"{entry.value} is {is_what}; {then}"
            where = f"{module.file.path} [{entry.group}]"
            # Pooling models have no logits processors, and vLLM loads none for them.
            spared = entry.group == server.PROCESSORS and not server.generates(env)
            level: Level = "error" if env.uses(entry) and not spared else "warning"
            yield Finding(CODE, level, entry.subject, what, where, fix)


def _fault(entry: EntryPoint, env: Environment) -> tuple[str, str, str] | None:
    """Return what an entry point is instead of what its group takes, the consequence, and the next step."""
    group = entry.group
    if group in _CLASSES:
        then, fix = f"{group} takes a class, so {_CLASSES[group]}", "point the entry point at the class itself"
    else:
        then = f"{group} takes a function that is called without arguments, so {_CALLED[group]}"
        fix = "point the entry point at a function without arguments"
    if not entry.attribute:
        return "a module", then, fix
    kind = _kind(entry, env)
    if isinstance(kind, _VALUES):
        return "a plain value", then, fix
    if group in _CLASSES:
        if isinstance(kind, Function | ast.Lambda):
            return "a function", then, fix
        return ("an object, not a class", then, fix) if isinstance(kind, ast.Call) else None
    if isinstance(kind, ast.AsyncFunctionDef):
        return (
            "a coroutine function",
            f"{group} takes a plain function: this one is never awaited, so it never runs",
            fix,
        )
    if isinstance(kind, ast.FunctionDef) and kind_in_source(kind, frozenset()) == "generator":
        return "a generator function", f"{group} takes a plain function: the body of this one never runs", fix
    if isinstance(kind, ast.FunctionDef | ast.Lambda) and (needs := _needed(kind.args, method=False)):
        return f"a function that needs {needs}", then, fix
    if isinstance(kind, ast.ClassDef):
        if group in _NAMING:
            name = f"{entry.module}.{entry.attribute}"
            then = f"{group} takes a function that returns the dotted name of a class, so {_NAMING[group]}"
            return "a class", then, f"write a function that returns '{name}', and point the entry point at it"
        start = _methods(kind).get("__init__")
        needs = _needed(start.args, method=True) if start is not None and not start.decorator_list else ""
        return (f"a class that needs {needs}", then, fix) if needs else None
    if isinstance(kind, ast.Call):
        return "an object that cannot be called", then, fix
    return None


def _kind(entry: EntryPoint, env: Environment) -> ast.AST | None:
    """Return what makes the object: a function, class or value, or a call whose result cannot be called."""
    found = env.definition(entry)
    if found is None:
        return None
    holder, node = found
    if isinstance(node, Function):
        return None if node.decorator_list else node
    if isinstance(node, ast.ClassDef):
        return node if _plain(node) else None
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        called = find_certain(holder, value.func.id, env.path)
        kind = called[1] if called is not None else None
        sure = isinstance(kind, ast.ClassDef) and _plain(kind) and not kind.bases and "__call__" not in _methods(kind)
        return value if sure else None
    return value if isinstance(value, (*_VALUES, ast.Lambda)) else None


def _plain(kind: ast.ClassDef) -> bool:
    """Return whether calling a class makes its instance: no decorator, no metaclass, no ``__new__``, no string."""
    bases = [base.id for base in kind.bases if isinstance(base, ast.Name)]
    return not (kind.decorator_list or kind.keywords or "__new__" in _methods(kind) or "str" in bases)


def _methods(kind: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}


def _needed(args: ast.arguments, *, method: bool) -> str:
    """Join the names of the parameters without a default, without ``self`` of a method."""
    found = [name for prefix, name, default in each_parameter(args) if default is None and "*" not in prefix]
    return ", ".join(found[int(method) :])
