"""Patches that general plugins register with managers of their own, while vLLM loads them.

``VLLM_CUSTOM_PATCHES`` comes from the plugin guides, so packages that know nothing of vllm-graft read it too: each has
its own manager and its own names. Such a name is left to its package, with a finding; a name that no package registers
stays an error. What is registered where shows only after all general plugins have been loaded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Final

from vllm_graft.findings import Finding
from vllm_graft.points import PATCHES_VARIABLE
from vllm_graft.switches import allowed_plugins

GENERAL: Final = "vllm.general_plugins"
"""The entry-point group of the plugins that vLLM calls in every process."""

_WITHOUT_MANAGERS: Final = frozenset({*sys.stdlib_module_names, "numpy", "torch", "transformers", "vllm", "vllm_graft"})
"""Packages without a manager of patches, which are most of what a process has imported."""


@dataclass(frozen=True, slots=True)
class GeneralPlugin:
    """One general plugin: its entry point's name, the distribution, and the module."""

    name: str
    package: str
    module: str

    def __str__(self) -> str:
        return f"{self.name} of {self.package}"

    @property
    def registers_patches(self) -> bool:
        """True if it may register patches; vLLM's own plugins in this group are resolvers, and ours registers none."""
        return self.module.partition(".")[0] not in ("vllm", "vllm_graft")

    def modules(self) -> Iterator[ModuleType]:
        """Yield the modules of its top-level package that this process has imported."""
        top = self.module.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == top and module is not None:
                yield module


@dataclass(frozen=True, slots=True)
class Manager:
    """Another package's manager that knows a patch: its place, and whether it has applied the patch."""

    plugin: GeneralPlugin
    place: str
    applied: bool | None

    def finding(self, name: str) -> Finding:
        """Return the finding about a patch that is left to this manager."""
        subject = f"patch {name}"
        if self.applied is False:
            what = f"is registered by {self.plugin} ({self.place}), which has not applied it in this process"
            fix = "look for that package's own error in the log; vllm-graft has no part in this patch"
            return Finding("P008", "warning", subject, what, PATCHES_VARIABLE, fix)
        what = f"belongs to {self.plugin} ({self.place}) and is left to it: vllm-graft neither applies nor proves it"
        fix = f"offer it under the entry-point group vllm_graft.plugins of {self.plugin.package} to have it proven"
        return Finding("P007", "info", subject, what, PATCHES_VARIABLE, fix)


def general_plugins(environ: Mapping[str, str] | None = None) -> list[GeneralPlugin]:
    """Return the general plugins that vLLM loads, given ``VLLM_PLUGINS``, and that may register patches."""
    allowed = allowed_plugins(environ)
    found = []
    for entry in metadata.entry_points(group=GENERAL):
        package = entry.dist.name if entry.dist is not None else "an unnamed distribution"
        plugin = GeneralPlugin(entry.name, package, entry.module)
        if plugin.registers_patches and (allowed is None or entry.name in allowed):
            found.append(plugin)
    return sorted(found, key=str)


def undecided(name: str, plugins: Collection[GeneralPlugin]) -> Finding:
    """Return the finding about a name while no plugin has been loaded yet."""
    who = ", ".join(str(plugin) for plugin in plugins)
    what = f"is offered by no package; whether a general plugin registers it ({who}) is known only once vLLM loads them"
    fix = "start the server; startup fails if no plugin registers this name"
    return Finding("P009", "warning", f"patch {name}", what, PATCHES_VARIABLE, fix)


def manager_of(name: str, plugins: Collection[GeneralPlugin]) -> Manager | None:
    """Return another package's manager that has registered a patch of this name, or None.

    Managers in the style of the guides come first: an object with a table ``available_patches``, in any package that
    the plugin imported. For other kinds the plugin's sources decide: they read the variable, and have the name as a
    string, a function or a class.
    """
    for plugin in plugins:
        for module in plugin.modules():
            if (found := _registered(module, name)) is not None:
                return Manager(plugin, *found)
    for full, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or full.partition(".")[0] in _WITHOUT_MANAGERS:
            continue
        if plugins and (found := _registered(module, name)) is not None:
            # It belongs to the plugin whose sources name the package of the module; to the first one if none does.
            top = re.compile(rf"\b{re.escape(full.partition('.')[0])}\b")
            named = (one for one in plugins if any(top.search(_source(each)) for each in one.modules()))
            return Manager(next(named, None) or next(iter(plugins)), *found)
    for plugin in plugins:
        names = {module.__name__: {*_names(module)} for module in plugin.modules()}
        readers = [module for module, held in names.items() if PATCHES_VARIABLE in held]
        if readers and any(name in held for held in names.values()):
            return Manager(plugin, readers[0], None)
    return None


def _registered(module: ModuleType, name: str) -> tuple[str, bool | None] | None:
    """Return the place of a module's manager that knows a patch, and whether it has applied it."""
    for attribute, value in list(vars(module).items()):
        try:
            held = object.__getattribute__(value, "__dict__")
        except (AttributeError, TypeError):
            continue
        table = held.get("available_patches") if isinstance(held, Mapping) else None
        if isinstance(table, Collection) and name in table:
            applied = held.get("applied_patches")
            return f"{module.__name__}.{attribute}", name in applied if isinstance(applied, Collection) else None
    return None


def _names(module: ModuleType) -> Iterator[str]:
    """Yield the strings of a module's code, its functions, classes and keywords; no docstrings and comments."""
    yield module.__name__.rpartition(".")[2]
    try:
        tree = ast.parse(_source(module))
    except (SyntaxError, ValueError):
        return
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg


def _source(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return ""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
