"""D034: a general plugin that ends every process of vLLM that loads it."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from vllm_graft.audit.model import Use
from vllm_graft.audit.releases.source_release import SourceRelease
from vllm_graft.audit.verdicts import ReleaseFacts, find_shape
from vllm_graft.doctor.environment import Environment
from vllm_graft.doctor.rules.d007_unresolvable import ImportReader, failing_import, modules_above
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.finder import find_certain
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.modules import SourceModule
from vllm_graft.sources.origins import SearchPath
from vllm_graft.sources.scopes import absolute, dotted, imported

CODE = "D034"
TITLE = "A plugin that ends every vLLM process"

GENERAL_GROUP: Final = "vllm.general_plugins"

_EXITS: Final = frozenset({"sys.exit", "os._exit", "os.abort", "exit", "quit"})
"""Calls after which nothing runs. vLLM catches no exception of a plugin's function, and no SystemExit of its import."""

_CATCHING: Final = {
    "exit": frozenset({"", "BaseException", "SystemExit", "KeyboardInterrupt"}),
    "import": frozenset({"", "BaseException", "Exception", "ImportError", "ModuleNotFoundError"}),
    "attribute": frozenset({"", "BaseException", "Exception", "AttributeError"}),
    "abort": frozenset[str](),
}
"""The handlers that catch each kind of ending; a bare ``except`` has no name. Any handler may catch another raise."""

_EXCEPTIONS: Final = frozenset(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
)

_PASSING: Final = frozenset(
    {
        "open",
        "contextlib.closing",
        "contextlib.nullcontext",
        "contextlib.redirect_stderr",
        "contextlib.redirect_stdout",
        "tempfile.NamedTemporaryFile",
        "tempfile.TemporaryDirectory",
        "threading.Lock",
        "threading.RLock",
        "torch.inference_mode",
        "torch.no_grad",
        "warnings.catch_warnings",
    }
)
"""Context managers that swallow no exception."""

_SOUND: Final = frozenset({*sys.stdlib_module_names, "numpy", "torch", "transformers", "vllm", "vllm_graft"})
"""Packages whose functions end no process, and that take long to read."""

_DEEP: Final = 5  # the number of functions and modules that are followed where one leads to another


@dataclass(frozen=True, slots=True)
class _Ending:
    """A statement that ends the process: "exit", "abort", "raise", or what fails for the reason ``why``.

    That is an "import", or an "attribute" of vLLM that is not there.
    """

    module: SourceModule
    node: ast.stmt
    kind: str
    why: str = ""


def check(env: Environment) -> Iterator[Finding]:
    """Find an exit that no condition guards, in the module or in the function."""
    for entry in env.in_group(GENERAL_GROUP):
        module = env.module(entry.module)
        if not isinstance(module, SourceModule) or entry.top_level in _SOUND:
            continue
        imports = ImportReader(env)
        loading = _Reader(env, imports, raises=False)
        above = [loading.ending(one, one.body) for one in modules_above(env, entry.module)]
        ending = next(filter(None, [*above, loading.ending(module, module.body)]), None)
        found = env.definition(entry) if ending is None else None
        if found is not None and isinstance(found[1], ast.FunctionDef):
            ending = _Reader(env, imports, raises=not found[1].decorator_list).ending(found[0], found[1].body)
        if ending is not None:
            why = f" ({ending.why})" if ending.why else ""
            what = (
                f"loading {entry.value} always comes to `{ast.unparse(ending.node)}`{why}, which vLLM does not catch: "
                "every process stops, the command line included"
            )
            fix = f"remove that, leave the plugin out by VLLM_PLUGINS, or uninstall {entry.package}"
            level: Level = "error" if env.loads(entry) else "warning"
            yield Finding(CODE, level, entry.subject, what, f"{ending.module.file.path}:{ending.node.lineno}", fix)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads what a plugin runs; ``raises`` says that an exception ends the process, as it does in its function."""

    env: Environment
    imports: ImportReader
    raises: bool
    deep: int = _DEEP
    seen: set[str] = field(default_factory=set)
    """The modules that have been read."""

    def ending(self, module: SourceModule, body: Sequence[ast.stmt]) -> _Ending | None:
        """Return the first statement that always ends the process, be it in a function that is called."""
        # An import after a change of ``sys.path`` in any of these modules may find what is not there now.
        self.imports.first_failing(module, certain=False)
        for node in body:
            found = self._end_of(module, node)
            returns = not isinstance(node, Function | ast.ClassDef) and any(
                isinstance(inner, ast.Return) for inner in ast.walk(node)
            )
            if found is not None or returns:
                return found
        return None

    def _end_of(self, module: SourceModule, node: ast.stmt) -> _Ending | None:
        if isinstance(node, ast.Raise):
            exception = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            is_exit = exception is not None and dotted(exception) in ("SystemExit", "KeyboardInterrupt")
            return _Ending(module, node, "exit" if is_exit else "raise") if self.raises or is_exit else None
        if isinstance(node, ast.Assert):
            fails = self.raises and isinstance(node.test, ast.Constant) and not node.test.value
            return _Ending(module, node, "raise") if fails else None
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._end_of_import(module, node)
        if isinstance(node, ast.If):
            ends = [self.ending(module, arm) for arm in (node.body, node.orelse)]
            if isinstance(node.test, ast.Constant):
                return ends[0] if node.test.value else ends[1]
            return ends[0] if all(ends) else None
        if isinstance(node, ast.With):
            found = self.ending(module, node.body)
            passes = found is not None and all(_lets_pass(module, one.context_expr, found.kind) for one in node.items)
            return found if passes else None
        if isinstance(node, ast.Try):
            return self._end_of_try(module, node) or self.ending(module, node.finalbody)
        runs = isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return)
        for one in _evaluated(node) if self.raises and runs else ():
            if why := _lacking(self.env, module, one):
                return _Ending(module, node, "attribute", why)
        call = node.value if isinstance(node, ast.Expr | ast.Assign | ast.Return) else None
        return self._end_of_call(module, node, call) if isinstance(call, ast.Call) else None

    def _end_of_try(self, module: SourceModule, node: ast.Try) -> _Ending | None:
        found = self.ending(module, node.body)
        for handler in node.handlers if found is not None else ():
            names = _caught(module, handler)
            if found is not None and found.kind != "abort" and names is None:
                return None
            if found is not None and names and names & _CATCHING.get(found.kind, names):
                # What a handler does with what is certain to fail is certain, too.
                return self.ending(module, handler.body) if found.kind in ("import", "attribute") else None
        return found

    def _end_of_import(self, module: SourceModule, node: ast.Import | ast.ImportFrom) -> _Ending | None:
        if self.raises and not self.imports.altered and (why := failing_import(self.env, module, node)):
            return _Ending(module, node, "import", why)
        self.imports.read_import(module, node, certain=False)
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [absolute(node, module.name, module.file.is_package)]
        for name in names if self.deep else ():
            own = name.partition(".")[0] == module.name.partition(".")[0] and name not in self.seen
            self.seen.add(name)
            found = self.env.module(name) if own else None
            if isinstance(found, SourceModule) and found is not module:
                inner = replace(self, deep=self.deep - 1).ending(found, found.body)
                if inner is not None:
                    return inner
        return None

    def _end_of_call(self, module: SourceModule, node: ast.stmt, call: ast.Call) -> _Ending | None:
        first, dot, rest = dotted(call.func).partition(".")
        origin = next(iter(module.imports(first)), None)
        full = ".".join(filter(None, [origin.module, origin.name, rest])) if origin is not None else first + dot + rest
        if full in _EXITS and not isinstance(node, ast.Assign):
            return _Ending(module, node, "abort" if full.startswith("os.") else "exit")
        readable = origin is None or origin.module.partition(".")[0] not in _SOUND
        called = find_certain(module, dotted(call.func), self.env.path) if first and readable and self.deep else None
        function = called[1] if called is not None else None
        runs = isinstance(function, ast.FunctionDef) and not (
            # A decorator may skip the body, and a generator waits with it.
            function.decorator_list or any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(function))
        )
        if called is None or not isinstance(function, ast.FunctionDef) or not runs:
            return None
        return replace(self, deep=self.deep - 1).ending(called[0], function.body)


def _evaluated(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that are read whenever a statement runs."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.IfExp | ast.BoolOp):
        inner = [node.test] if isinstance(node, ast.IfExp) else node.values[:1]
    for one in inner:
        if not isinstance(one, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _evaluated(one)


def _lacking(env: Environment, module: SourceModule, node: ast.Attribute) -> str:
    """Say that a module or class of vLLM lacks an attribute; empty if it has it, or if reading does not tell."""
    special = node.attr.startswith("__") and node.attr.endswith("__")
    first = node.value.id if isinstance(node.value, ast.Name) and not special else ""
    everywhere = list(ast.walk(module.tree)) if first else []
    origins = {
        found
        for one in everywhere
        if isinstance(one, ast.Import | ast.ImportFrom)
        and (found := imported(one, first, module.name, module.file.is_package)) is not None
    }
    set_before = any(
        (isinstance(one, ast.Name) and one.id == first and not isinstance(one.ctx, ast.Load))
        or (isinstance(one, ast.arg) and one.arg == first)
        or (
            isinstance(one, ast.Attribute)
            and one.attr == node.attr
            and not isinstance(one.ctx, ast.Load)
            and one.lineno < node.lineno
        )
        for one in everywhere
    )
    origin = origins.pop() if len(origins) == 1 and not set_before else None
    if origin is None or origin.module.partition(".")[0] != "vllm" or env.vllm is None:
        return ""
    facts = _facts_of(env.path, env.root, env.vllm)
    shape = find_shape(facts.release, Use("import", origin.module, origin.name, "", 0))
    on_demand = shape is not None and facts.has(shape.module, "__getattr__") and not shape.qualname
    if on_demand or facts.attribute(origin.module, origin.name, node.attr) is not False:
        return ""
    return f"vLLM {facts.version} has no {node.attr!r} in {shape.name if shape is not None else origin.name}"


@functools.lru_cache(maxsize=1)
def _facts_of(path: tuple[str, ...], root: Path | None, version: str) -> ReleaseFacts:
    """Return what the sources of the vLLM that would be imported say of a name."""
    return ReleaseFacts(SourceRelease(SearchPath(path, root), version))


def _caught(module: SourceModule, handler: ast.ExceptHandler) -> set[str] | None:
    """Return the built-in exceptions that a handler names, "" for all; None if it may catch any other."""
    if handler.type is None:
        return {""}
    names = {dotted(kind) for kind in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])}
    return names if all(name in _EXCEPTIONS and name not in module.namespace.bound for name in names) else None


def _lets_pass(module: SourceModule, manager: ast.expr, kind: str) -> bool:
    """Return whether an ending leaves the body of a ``with``: few context managers swallow an exit, many an error."""
    made = [manager]
    if isinstance(manager, ast.Name):
        assigned = [one for one in ast.walk(module.tree) if isinstance(one, ast.Assign)]
        made = [one.value for one in assigned if manager.id in map(dotted, one.targets)]
    names = {_origin(module, one.func) if isinstance(one, ast.Call) else "" for one in made}
    if kind == "abort" or (names and names <= _PASSING):
        return True
    return kind == "exit" and bool(names) and not any(name.rpartition(".")[2] in ("", "suppress") for name in names)


def _origin(module: SourceModule, called: ast.expr) -> str:
    """Return the full name of what is called, by the imports of the module and of its functions."""
    first, _, rest = dotted(called).partition(".")
    found = [
        imported(node, first, module.name, module.file.is_package)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    origin = next(filter(None, found), None)
    if origin is None and first in module.namespace.bound:
        return f"{module.name}.{first}"
    return ".".join(filter(None, [origin.module, origin.name, rest] if origin is not None else [first, rest]))
