"""D033: a plugin that returns the path of a class that is not there, or registers a model by one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm_graft.doctor.environment import Environment
from vllm_graft.doctor.rules.d007_unresolvable import unbound
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.finder import find_certain
from vllm_graft.sources.modules import Missing, SourceModule
from vllm_graft.sources.scopes import dotted

CODE = "D033"
TITLE = "A plugin that names a class that is not there"

GROUPS: Final = {
    "vllm.platform_plugins": "vLLM stops in the middle of its import",
    "vllm.io_processor_plugins": "a server that uses it stops at its start",
}
"""Groups whose functions return the dotted path of a class, and the consequence of a wrong one."""


def check(env: Environment) -> Iterator[Finding]:
    """Look up every path that a function returns as plain text, and refuse a class in its place."""
    for entry, module, function in env.functions(*GROUPS):
        reader = _TextReader(module, function, env.path)
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or node.value is None:
                continue
            texts = reader.texts(node.value)
            faults = [
                (f"it returns {path!r}, but {lacking}", sure)
                for path, sure in texts
                if (lacking := _lacking(env, path))
            ]
            if cls := reader.class_name(node.value):
                faults.append((f"it returns the class {cls} itself, but vLLM takes a dotted path", True))
            for what, sure in faults:
                level: Level = "error" if node in function.body and sure and env.uses(entry) else "warning"
                fix = "return the dotted path of a class that can be imported"
                where = f"{module.file.path}:{node.lineno}"
                yield Finding(CODE, level, entry.subject, f"{what}; {GROUPS[entry.group]}", where, fix)
    yield from _registered_models(env)


def _registered_models(env: Environment) -> Iterator[Finding]:
    """Look up every model that a general plugin registers by a plain text; vLLM imports it when it is served."""
    for entry, module, function in env.functions("vllm.general_plugins"):
        reader = _TextReader(module, function, env.path)
        certain = [one.value for one in function.body if isinstance(one, ast.Expr)]
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] != "register_model":
                continue
            given = [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "model_cls")]
            for path, sure in (each for one in given for each in reader.texts(one)):
                level: Level = "warning"
                home, colon, name = path.partition(":")
                then = ""
                if not colon or ":" in name:
                    then = "that is not 'module:Class', and vLLM raises a ValueError: every process stops"
                    level = "error" if node in certain and sure and env.loads(entry) else "warning"
                elif lacking := _lacking(env, f"{home}.{name}"):
                    then = f"{lacking}; a server of that model stops at its start"
                if then:
                    what = f"it registers a model as {path!r}, but {then}"
                    fix = "write 'module:Class' of a class that can be imported"
                    yield Finding(CODE, level, entry.subject, what, f"{module.file.path}:{node.lineno}", fix)


def _lacking(env: Environment, path: str) -> str:
    home, dot, name = path.rpartition(".")
    found = env.module(home) if dot else None
    if isinstance(found, Missing):
        return found.why
    return "that is not a dotted path" if not dot else unbound(env, found, name) if found is not None else ""


@dataclass(frozen=True, slots=True)
class _TextReader:
    """Reads the expressions of one function, in its module."""

    module: SourceModule
    function: ast.FunctionDef
    path: Sequence[str]

    def texts(self, node: ast.expr) -> list[tuple[str, bool]]:
        """Return the plain texts that an expression may be, each with whether it is the only one."""
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return [(text, False) for each in parts for text, _ in self.texts(each)]
        text = self._text(node)
        return [(text, True)] if text is not None else []

    def class_name(self, node: ast.expr) -> str:
        """Return the name of the class that an expression is; empty for anything else."""
        found = None
        if isinstance(node, ast.Name) and not self._stores(node.id):
            found = find_certain(self.module, node.id, self.path)
        return found[1].name if found is not None and isinstance(found[1], ast.ClassDef) else ""

    def _text(self, node: ast.expr) -> str | None:
        """Return the text of an expression of constants, their names and concatenations; None for any other."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr | ast.BinOp):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node.left, node.right]
            if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add):
                return None
            plain = [each.value if isinstance(each, ast.FormattedValue) else each for each in parts]
            texts = [self._text(each) for each in plain]
            return None if None in texts else "".join(filter(None, texts))
        if isinstance(node, ast.Call):
            return self._result(node)
        if not isinstance(node, ast.Name):
            return None
        if node.id == "__name__":
            return self.module.name
        if stores := self._stores(node.id):
            own = [one for one in self.function.body if isinstance(one, ast.Assign) and stores[0] in one.targets]
            return self._text(own[0].value) if len(own) == len(stores) == 1 and _name(own[0].value) != node.id else None
        found = find_certain(self.module, node.id, self.path)
        if found is None or not isinstance(found[1], ast.Assign):
            return None
        return replace(self, module=found[0])._text(found[1].value)

    def _result(self, node: ast.Call) -> str | None:
        """Return the text that a function without arguments returns, by its only statement."""
        found = find_certain(self.module, dotted(node.func), self.path) if not (node.args or node.keywords) else None
        made = found[1] if found is not None else None
        if found is None or not isinstance(made, ast.FunctionDef) or made.decorator_list or made is self.function:
            return None
        last = made.body[-1]
        returns = [one for one in ast.walk(made) if isinstance(one, ast.Return)]
        if returns != [last] or not isinstance(last, ast.Return) or not isinstance(last.value, ast.Constant | ast.Name):
            return None
        return replace(self, module=found[0], function=made)._text(last.value)

    def _stores(self, name: str) -> list[ast.Name]:
        found = (one for one in ast.walk(self.function) if isinstance(one, ast.Name) and one.id == name)
        return [one for one in found if isinstance(one.ctx, ast.Store)]


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
