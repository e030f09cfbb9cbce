"""D007: an entry point that names, or whose module imports, something that is not there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from vllm_graft.doctor import plans
from vllm_graft.doctor.environment import GROUPS, EntryPoint, Environment
from vllm_graft.errors import nearest
from vllm_graft.findings import Finding, Level
from vllm_graft.plan.catalogue import ITEM_GROUP
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.locate import find_spec
from vllm_graft.sources.modules import Missing, SourceModule
from vllm_graft.sources.scopes import Namespace, absolute

CODE = "D007"
TITLE = "An entry point whose module or object is not there"

_SOUND: Final = frozenset({"vllm", "vllm_graft"})
"""Packages whose plugins are as sound as their installation."""

_FINDING: Final = frozenset({"modules", "meta_path", "path_hooks", "path", "addsitedir", "*"})
"""What decides where imports are found, in ``sys`` and ``site``."""


def check(env: Environment) -> Iterator[Finding]:
    """Judge by the files alone, and only if they are certain."""
    for entry in env.in_group(*GROUPS, ITEM_GROUP):
        found = env.module(entry.module)
        lacking = found.why if isinstance(found, Missing) else _lacking(found, entry, env) if found else ""
        where, fix = f"{entry.where} [{entry.group}]", f"correct the entry point and install {entry.package} again"
        # D035 imports planned patches.
        if (
            not lacking
            and isinstance(found, SourceModule)
            and entry.group != ITEM_GROUP
            and entry.top_level not in _SOUND
        ):
            reader = ImportReader(env)
            for module in (*modules_above(env, entry.module), found):
                if not lacking and (failing := reader.first_failing(module)) is not None:
                    where, lacking = failing
                    fix = f"install what it imports, or a release of {entry.package} for this vLLM"
        if lacking:
            what = f"{entry.value} cannot be loaded: {lacking}; {_consequence(env, entry)}"
            level: Level = "error" if plans.loads(env, entry) else "warning"
            yield Finding(CODE, level, entry.subject, what, where, fix)


def _lacking(module: SourceModule, entry: EntryPoint, env: Environment) -> str:
    first, _, rest = entry.attribute.partition(".")
    lacking = unbound(env, module, first) if first else ""
    if lacking or not first:
        return lacking
    kind = module.namespace.only(first)
    if rest and isinstance(kind, ast.ClassDef) and not (kind.bases or kind.keywords or kind.decorator_list):
        held = Namespace(kind)
        name = rest.partition(".")[0]
        if held.is_closed and name not in held.bound and not hasattr(object, name):
            return f"the class {first} in {module.file.path} has no {name!r}"
    return ""


def unbound(env: Environment, module: SourceModule, name: str) -> str:
    """Say that a module does not bind a name; empty if it does, or if reading does not tell."""
    names = module.namespace
    if not names.is_closed or name in names.bound:
        return ""
    # ``package:module`` is valid for a submodule that has been imported.
    if module.file.is_package and not isinstance(env.module(f"{module.name}.{name}"), Missing):
        return ""
    public = [each for each in names.bound if not each.startswith("_")]
    return f"{module.file.path} binds no {name!r}{nearest(name, public)}"


def failing_import(env: Environment, module: SourceModule, node: ast.Import | ast.ImportFrom) -> str:
    """Say why an import statement of a module fails; empty if it does not, or if reading does not tell.

    Of packages other than the module's own and vLLM only the first name is looked up.
    """
    origin = absolute(node, module.name, module.file.is_package) if isinstance(node, ast.ImportFrom) else ""
    for name in [origin] if origin else [alias.name for alias in node.names]:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or (top == "vllm" and find_spec(top, env.path) is None):
            continue
        if top not in ("vllm", module.name.partition(".")[0]):
            if find_spec(top, env.path) is None:
                return f"there is no module {top!r}"
            continue
        found = env.module(name)
        if isinstance(found, Missing):
            return found.why
        for alias in node.names if found is not None and origin else ():
            if lacking := unbound(env, found, alias.name) if found is not None and alias.name != "*" else "":
                return lacking
    return ""


@dataclass(slots=True)
class ImportReader:
    """Reads the imports of a package's modules in the order in which they run.

    seen:      the modules that have been read, with whether it was certain that they run
    altered:   whether one of them may change how imports are found: of later ones none is known to fail
    """

    env: Environment
    seen: set[tuple[str, bool]] = field(default_factory=set)
    altered: bool = False

    def first_failing(self, module: SourceModule, *, certain: bool = True) -> tuple[str, str] | None:
        """Return the place of the first import that fails when a module is imported, and the reason.

        Modules of the same package are followed. If it is not certain that the module runs, none is returned.
        """
        if self.altered or (module.name, certain) in self.seen:
            return None
        self.seen.add((module.name, certain))
        self.altered = _alters_imports(module)
        for statement in module.body:
            for node in _imports_in(statement):
                found = self.read_import(module, node, certain=certain and node is statement)
                if found is not None or self.altered:
                    return found
        return None

    def read_import(
        self, module: SourceModule, node: ast.Import | ast.ImportFrom, *, certain: bool = True
    ) -> tuple[str, str] | None:
        """Return what ``first_failing`` does, for one import statement and the modules that it loads."""
        if self.altered:
            return None
        if certain and (why := failing_import(self.env, module, node)):
            return f"{module.file.path}:{node.lineno}", f"`{ast.unparse(node)}` fails, because {why}"
        origin = absolute(node, module.name, module.file.is_package) if isinstance(node, ast.ImportFrom) else ""
        names = [(name, certain) for name in ([origin] if origin else [alias.name for alias in node.names])]
        # ``from package import name`` loads a module of that name, unless the package binds it.
        names += [(f"{origin}.{alias.name}", False) for alias in node.names if origin]
        for name, sure in names:
            own = name.partition(".")[0] == module.name.partition(".")[0]
            inner = self.env.module(name) if own else None
            found = self.first_failing(inner, certain=sure) if isinstance(inner, SourceModule) else None
            if found is not None:
                return found
        return None


def _imports_in(statement: ast.stmt) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that a statement may run; a function that it defines waits with its own."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield statement
    elif not isinstance(statement, Function):
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from _imports_in(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                for inner in child.body:
                    yield from _imports_in(inner)


def _alters_imports(module: SourceModule) -> bool:
    """Return whether a module mentions what decides where imports are found, such as ``sys.path``."""
    for node in ast.walk(module.tree):
        # ``os.path`` is in most modules, and has nothing to do with imports.
        if isinstance(node, ast.Attribute) and node.attr in _FINDING and ast.unparse(node) != "os.path":
            return True
        named = node.names if isinstance(node, ast.ImportFrom) and node.module in ("sys", "site") else []
        if any(alias.name in _FINDING for alias in named):
            return True
    return False


def modules_above(env: Environment, name: str) -> Iterator[SourceModule]:
    """Yield the packages that are imported before a module."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        found = env.module(".".join(parts[:count]))
        if isinstance(found, SourceModule):
            yield found


def _consequence(env: Environment, entry: EntryPoint) -> str:
    if entry.group == ITEM_GROUP:
        return "a plan that names it is refused"
    if not env.loads(entry):
        return "with this VLLM_PLUGINS vLLM does not try, so it goes unnoticed for now"
    if entry.group == "vllm.logits_processors":
        return "vLLM refuses to start with it"
    if entry.group == "vllm.io_processor_plugins":
        return "a server that is told to use it does not start"
    # load_plugins_by_group catches every Exception of an import (vllm/plugins/__init__.py).
    return "vLLM logs a traceback and continues without it"
