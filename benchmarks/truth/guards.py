"""Conditions and ``try`` statements around a use: does that code run on this release?

A condition is evaluated for real, with the names of vLLM and the package's own helper functions in it; where that does
not work and it does ask for a version, a name or a module, nothing is said of the code behind it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from truth.collect import (
    Attempt,
    Condition,
    Elsewhere,
    Fallback,
    Function,
    Guards,
    Module,
    Never,
    Package,
    Scope,
    Upstream,
    absolute,
    is_upstream,
    statements,
)
from truth.verdicts import Broken, Undecided

if TYPE_CHECKING:
    from truth.oracle import Oracle

_IMPORTABLE = {
    "vllm",
    "packaging",
    "sys",
    "os",
    "importlib",
    "inspect",
    "re",
    "functools",
    "typing",
    "torch",
    "platform",
}
_MACHINE = (
    "sys.argv", "sys.platform", "os.environ", "os.getenv", "platform.", "torch.cuda", "torch.xpu", "torch.version",
)  # fmt: skip
_DEEP = 6


class NotEvaluated(Exception):
    """A condition that needs something that is not there."""


class Evaluator:
    """Evaluates conditions; one for all packages, with their results kept."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._known: dict[int, bool | None] = {}
        self._alive: list[object] = []

    def runs(self, guards: Guards) -> bool | None:
        """Tell whether code behind guards runs on this release; None where that is not known."""
        answers = [self._one(guard) for guard in guards]
        if False in answers:
            return False
        return None if None in answers else True

    def survives(self, guards: Guards, error: str) -> bool:
        """Tell whether the code around provides for an error."""
        kinds = {"ImportError": {"ImportError"}, "ModuleNotFoundError": {"ImportError", "ModuleNotFoundError"}}
        names = {"*"} | kinds.get(error, {error})
        return any(isinstance(one, Attempt) and one.errors & names for one in guards)

    def _one(self, guard: object) -> bool | None:
        if isinstance(guard, Never):
            return False
        if isinstance(guard, Fallback):
            return self._fails(guard)
        if not isinstance(guard, Condition):
            return True
        if self._asks_the_machine(guard.test, guard.scope):
            return True
        key = id(guard.test)
        if key not in self._known:
            self._alive.append(guard.test)
            self._known[key] = self._condition(guard.test, guard.scope)
        answer = self._known[key]
        if answer is None:
            # A condition on the request or the options may come out either way: the code does run at times.
            return None if asks(guard.test) or _flagged(guard.test, guard.scope) else True
        return answer is guard.branch

    def _asks_the_machine(self, test: ast.expr, scope: Scope) -> bool:
        """Tell whether a condition goes by the machine or the command line, so that it is another one elsewhere.

        ``current_platform.is_cuda()``, ``HAS_TRITON``, ``envs.VLLM_USE_V1``: what vLLM holds as a value that is no
        version. A test for a name, ``hasattr(current_platform, "is_xpu")``, is none of these.
        """
        asked = [one.args[0] for one in ast.walk(test) if isinstance(one, ast.Call) and _is_test_for_name(one)]
        inner = {id(node) for one in asked for node in ast.walk(one)}
        for node in ast.walk(test):
            if not isinstance(node, ast.Name | ast.Attribute) or id(node) in inner:
                continue
            text = ast.unparse(node)
            if text.startswith(_MACHINE):
                return True
            if "version" in text.lower():
                continue
            refs = scope.module.package.upstream(node, scope)
            for ref in refs:
                try:
                    found = self._oracle.get(ref)
                except (Broken, Undecided):
                    continue
                if found is not None and not isinstance(found, type | types.ModuleType) and not callable(found):
                    return True
        return False

    def modules_run(self, package: Package) -> dict[str, bool | None]:
        """Tell of each module whether it is imported on this release: not where every way to it is behind a false test.

        Ways begin at top-level packages and at modules that nobody imports, which others may name.
        """
        ways: dict[str, list[tuple[str, bool | None]]] = {}
        for name, found in package.importers.items():
            for importer, guards in found:
                ways.setdefault(importer, []).append((name, self.runs(guards)))
        starts = [name for name in package.modules if "." not in name or not package.importers.get(name)]
        certain = _reached(starts, ways, (True,))
        possible = _reached(starts, ways, (True, None))
        known = _reached(starts, ways, (True, None, False))
        return {
            name: True if name in certain or name not in known else None if name in possible else False
            for name in package.modules
        }

    def _condition(self, test: ast.expr, scope: Scope) -> bool | None:
        if isinstance(test, ast.BoolOp):
            answers = [self._condition(one, scope) for one in test.values]
            decisive = isinstance(test.op, ast.Or)
            if decisive in answers:
                return decisive
            return None if None in answers else not decisive
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._condition(test.operand, scope)
            return None if inner is None else not inner
        if not asks(test) and not isinstance(test, ast.Name | ast.Call | ast.Compare):
            return None
        try:
            return bool(self._value(test, scope, 0))
        except (NotEvaluated, Broken, Undecided):
            return None

    def _fails(self, guard: Fallback) -> bool | None:
        """Tell whether the body of a ``try`` fails because of what it imports from vLLM."""
        only_imports = True
        unsure = False
        module = guard.scope.module
        for node in statements(guard.body):
            if isinstance(node, ast.ImportFrom) and is_upstream(source := absolute(node, module)):
                refs = [Upstream(source, () if alias.name == "*" else (alias.name,)) for alias in node.names]
            elif isinstance(node, ast.Import) and any(is_upstream(alias.name) for alias in node.names):
                refs = [Upstream(alias.name) for alias in node.names if is_upstream(alias.name)]
            else:
                only_imports = only_imports and isinstance(node, ast.Assign | ast.Pass)
                continue
            answers = [self._oracle.status(ref) for ref in refs]
            if "broken" in answers:
                return True
            unsure = unsure or "undecided" in answers
        return False if only_imports and not unsure else None

    def _value(self, node: ast.expr, scope: Scope, depth: int) -> object:
        names = self._namespace(node, scope, depth)
        try:
            return eval(compile(ast.Expression(node), "<guard>", "eval"), names)
        except Exception as error:
            raise NotEvaluated from error

    def _namespace(
        self, node: ast.AST, scope: Scope, depth: int, own: frozenset[str] = frozenset()
    ) -> dict[str, object]:
        if depth > _DEEP:
            raise NotEvaluated
        names: dict[str, object] = {"__builtins__": builtins}
        for one in ast.walk(node):
            if (
                isinstance(one, ast.Name)
                and isinstance(one.ctx, ast.Load)
                and one.id not in names
                and one.id not in own
            ):
                found = scope.lookup(one.id)
                if found:
                    names[one.id] = self._bound(one.id, found, scope, depth)
                elif not hasattr(builtins, one.id):
                    raise NotEvaluated
        return names

    def _bound(self, name: str, found: list[object], scope: Scope, depth: int) -> object:
        resolved = scope.module.package.resolve(found)
        if all(isinstance(one, Upstream) for one in resolved):
            return self._oracle.live(tuple(one for one in resolved if isinstance(one, Upstream)))
        if len(resolved) != 1:
            raise NotEvaluated
        (one,) = resolved
        if isinstance(one, Function):
            home = self._home(one, scope)
            return self._function(one, home, depth)
        if isinstance(one, Elsewhere):
            raise NotEvaluated
        origin, home = self._origin(name, found, scope)
        return self._assigned(origin, home, depth)

    def _home(self, node: Function, scope: Scope) -> Scope:
        for module in scope.module.package.modules.values():
            if any(node is one for bound in module.scope.names.values() for one in bound):
                return module.scope
        return scope

    def _origin(self, name: str, found: list[object], scope: Scope) -> tuple[str, Scope]:
        """Return the module-level name that a name comes from."""
        (one,) = found
        if isinstance(one, Elsewhere) and one.name:
            module = scope.module.package.modules.get(one.module)
            if module is None or one.name not in module.scope.names:
                raise NotEvaluated
            inner = module.scope.names[one.name]
            if len(inner) != 1:
                raise NotEvaluated
            return self._origin(one.name, inner, module.scope)
        return name, scope.module.scope

    def _assigned(self, name: str, scope: Scope, depth: int) -> object:
        """Return the value of a constant, or of a module from outside."""
        if len(scope.names.get(name, [])) != 1:
            raise NotEvaluated
        for node in statements(scope.module.tree.body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                value = self._foreign(node, name, scope.module)
                if value is not None:
                    return value
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if any(isinstance(one, ast.Name) and one.id == name for one in targets) and node.value is not None:  # type: ignore[attr-defined]
                return self._value(node.value, scope, depth + 1)  # type: ignore[attr-defined]
        raise NotEvaluated

    def _foreign(self, node: ast.Import | ast.ImportFrom, name: str, module: Module) -> object | None:
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if bound != name and alias.name != name:
                continue
            try:
                if isinstance(node, ast.ImportFrom):
                    if node.level or (node.module or "").partition(".")[0] not in _IMPORTABLE:
                        raise NotEvaluated
                    return getattr(importlib.import_module(node.module or ""), alias.name)
                if alias.name.partition(".")[0] not in _IMPORTABLE:
                    raise NotEvaluated
                importlib.import_module(alias.name)
                return importlib.import_module(alias.name if alias.asname else alias.name.partition(".")[0])
            except (ImportError, AttributeError) as error:
                raise NotEvaluated from error
        return None

    def _function(self, node: Function, scope: Scope, depth: int) -> object:
        """Return a short helper function of the package, defined anew."""
        if (node.end_lineno or 0) - node.lineno > 40 or isinstance(node, ast.AsyncFunctionDef):
            raise NotEvaluated
        bare = ast.FunctionDef(
            name=node.name,
            args=ast.arguments(
                posonlyargs=[ast.arg(one.arg) for one in node.args.posonlyargs],
                args=[ast.arg(one.arg) for one in node.args.args],
                vararg=node.args.vararg and ast.arg(node.args.vararg.arg),
                kwonlyargs=[ast.arg(one.arg) for one in node.args.kwonlyargs],
                kw_defaults=node.args.kw_defaults,
                kwarg=node.args.kwarg and ast.arg(node.args.kwarg.arg),
                defaults=node.args.defaults,
            ),
            body=node.body,
            decorator_list=[],
            returns=None,
        )
        local = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        local |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        for one in ast.walk(node):
            if isinstance(one, ast.Import | ast.ImportFrom):
                source = one.module or "" if isinstance(one, ast.ImportFrom) else one.names[0].name
                if getattr(one, "level", 0) or source.partition(".")[0] not in _IMPORTABLE:
                    raise NotEvaluated
                local |= {alias.asname or alias.name.partition(".")[0] for alias in one.names}
            elif isinstance(one, ast.ExceptHandler) and one.name:
                local.add(one.name)
        names = self._namespace(ast.Module(bare.body, []), scope, depth + 1, frozenset(local))
        tree = ast.fix_missing_locations(ast.Module([bare], []))
        try:
            exec(compile(tree, "<guard>", "exec"), names)
        except Exception as error:
            raise NotEvaluated from error
        return names[node.name]


def _reached(
    starts: Iterable[str], ways: Mapping[str, list[tuple[str, bool | None]]], allowed: tuple[bool | None, ...]
) -> set[str]:
    """Return the modules that imports lead to, by those that run in one of the allowed ways."""
    left = list(starts)
    found = set(left)
    while left:
        for name, runs in ways.get(left.pop(), ()):
            if runs in allowed and name not in found:
                found.add(name)
                left.append(name)
    return found


def _is_test_for_name(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")


def _flagged(test: ast.expr, scope: Scope) -> bool:
    """Tell whether a condition goes by a variable that an earlier test of the version or for a name has set."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    place: Scope | None = scope
    while place is not None:
        for node in statements(place.body):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if names & {one.id for one in targets if isinstance(one, ast.Name)} and asks(node.value):  # type: ignore[attr-defined]
                return True
        place = place.parent
    return False


def asks(test: ast.expr) -> bool:
    """Tell whether a condition asks for a version, a name or a module."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("hasattr", "getattr", "find_spec", "signature", "callable", "isinstance", "issubclass"):
                return True
            if "version" in called.lower() or "available" in called.lower() or "has_" in called.lower():
                return True
        elif isinstance(node, ast.Name | ast.Attribute):
            word = (node.id if isinstance(node, ast.Name) else node.attr).lower()
            if any(part in word for part in ("version", "available", "has_", "supports", "legacy", "vllm")):
                return True
        elif isinstance(node, ast.Compare) and ast.unparse(node).endswith((" is None", " is not None")):
            return True
    return False
