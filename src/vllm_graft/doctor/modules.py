"""Modules read as they are written, for what an entry point names. Nothing is imported, the packages above included."""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from vllm_graft.patching.upstream.scopes import absolute

_COMPUTED: Final = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr", "modules"})
"""Names whose use in a module means that reading it does not tell what it holds."""

_FINDING: Final = frozenset({"__path__", "modules", "meta_path", "path_hooks"})
"""Names whose use in a package means that its folders do not tell which modules it has."""

_FOLLOWED: Final = 8
"""How many imports are followed from one module to the next before we stop being sure."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A module that cannot be imported, and why."""

    why: str


@dataclass(frozen=True)
class Module:
    """One module as it is written."""

    name: str
    file: str
    tree: ast.Module
    is_package: bool
    folders: tuple[str, ...]

    @cached_property
    def bound(self) -> dict[str, list[ast.AST]]:
        """The names that its top level binds, each with the statements that may do it."""
        found: dict[str, list[ast.AST]] = {}
        for name, node in _bindings(self.tree):
            found.setdefault(name, []).append(node)
        return found

    @cached_property
    def closed(self) -> bool:
        """Whether what is bound there is all there is: no star import, nothing computed, no ``__getattr__``."""
        return "*" not in self.bound and "__getattr__" not in self.bound and not self.uses(_COMPUTED)

    def uses(self, names: Collection[str]) -> bool:
        """Whether any of some names stands anywhere in it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in names:
                    return True
        return False

    def only(self, name: str) -> ast.AST | None:
        """The one statement that binds a name, if there is one and it is not inside an ``if`` or ``try``."""
        nodes = self.bound.get(name, [])
        sure = len(nodes) == 1 and self.closed and nodes[0] in self.tree.body
        return nodes[0] if sure else None


def read(name: str, path: Sequence[str]) -> Module | Missing | None:
    """A module by its dotted name; None where it is there, and its source cannot be had."""
    spec = locate(name, path)
    return _parsed(name, spec) if isinstance(spec, importlib.machinery.ModuleSpec) else spec


def locate(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | Missing | None:
    """Where a module lies; None where nobody knows, and for a folder without a file of its own."""
    spec: importlib.machinery.ModuleSpec | None = None
    places = list(path)
    parts = name.split(".")
    for done in range(1, len(parts) + 1):
        above, spec = spec, _spec(".".join(parts[:done]), places, top=done == 1)
        if spec is None:
            if above is None or _static(above):
                return Missing(f"there is no module {'.'.join(parts[:done])!r}")
            return None
        places = list(spec.submodule_search_locations or ())
    return spec if spec is not None and spec.loader is not None else None


def text_of(spec: importlib.machinery.ModuleSpec) -> str | None:
    """The source of a module; None where it has none that can be read."""
    try:
        found: str | None = getattr(spec.loader, "get_source", lambda name: None)(spec.name)
    except (ImportError, OSError, SyntaxError, ValueError):
        return None
    return found


def definition(module: Module, name: str, path: Sequence[str]) -> tuple[Module, ast.AST] | None:
    """The statement that makes an object, through imports and second names; None where reading is not certain."""
    for _ in range(_FOLLOWED):
        node = module.only(name)
        if isinstance(node, ast.ImportFrom):
            (name,) = (alias.name for alias in node.names if (alias.asname or alias.name) == name)
            found = read(absolute(node, module.name, module.is_package), path)
            if not isinstance(found, Module) or (found.is_package and name not in found.bound):
                return None
            module = found
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            name = node.value.id
        else:
            return (module, node) if node is not None else None
    return None


def _spec(name: str, path: Sequence[str], *, top: bool) -> importlib.machinery.ModuleSpec | None:
    try:
        spec = importlib.machinery.PathFinder.find_spec(name, list(path))
        if spec is not None and spec.loader is None:
            return _namespace(name, path)
    except KeyError:
        # A folder without __init__.py: Python wants the package above it imported before it says more.
        return _namespace(name, path)
    except (ImportError, ValueError):
        return None
    if spec is not None or not top:
        return spec
    # Built-in modules, and what an editable install maps by a finder of its own.
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(name, None)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None:
            return spec
    return None


def _namespace(name: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    folders = [str(place) for folder in path if (place := Path(folder) / name.rpartition(".")[2]).is_dir()]
    if not folders:
        return None
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = folders
    return spec


def _static(package: importlib.machinery.ModuleSpec) -> bool:
    """Whether a package has the modules that its folders have, and no more."""
    if package.loader is None:
        return True
    found = _parsed(package.name, package)
    return isinstance(found, Module) and not found.uses(_FINDING)


def _parsed(name: str, spec: importlib.machinery.ModuleSpec) -> Module | Missing | None:
    text = text_of(spec)
    try:
        tree = ast.parse(text or "")
    except SyntaxError as error:
        return Missing(f"{spec.origin}:{error.lineno} is not valid Python: {error.msg}")
    except ValueError:
        return None
    if text is None:
        return None
    folders = spec.submodule_search_locations
    return Module(name, spec.origin or name, tree, folders is not None, tuple(folders or ()))


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that a scope binds, with the outermost statement that stands for each."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
            # What a function declares global, it may bind.
            for inner in ast.walk(child):
                if isinstance(inner, ast.Global):
                    yield from ((name, inner) for name in inner.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], child) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((alias.asname or alias.name, child) for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, child
        elif isinstance(child, ast.AnnAssign) and child.value is None:
            continue
        elif isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Name):
            yield child.targets[0].id, child
            yield from _bindings(child.value)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id, child
        else:
            if isinstance(child, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and child.name:
                yield child.name, child
            yield from _bindings(child)
