"""Patches that general plugins register themselves while vLLM loads them, rather than under our entry-point group.

``VLLM_CUSTOM_PATCHES`` is a name out of the plugin guides, so packages read it that know nothing of vllm-graft: each
brings a manager of its own, with names of its own. Such a name is left to its package and said; one that nobody
registers stays an error. Who registers what shows only once all general plugins have been loaded.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Final

from vllm_graft.findings import Finding

GENERAL: Final = "vllm.general_plugins"
"""The entry-point group of the plugins that vLLM calls in every process."""

PATCHES_VARIABLE: Final = "VLLM_CUSTOM_PATCHES"


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
        """Whether it may have patches by name; vLLM's own plugins in this group are resolvers, and ours has none."""
        return self.module.partition(".")[0] not in ("vllm", "vllm_graft")

    def modules(self) -> Iterator[ModuleType]:
        """The modules of its top-level package that this process has imported."""
        top = self.module.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == top and module is not None:
                yield module


@dataclass(frozen=True, slots=True)
class Manager:
    """The manager of another package that knows a patch: where it is, and whether it says the patch is applied."""

    plugin: GeneralPlugin
    place: str
    applied: bool | None

    def finding(self, name: str) -> Finding:
        """What is to be said of a patch that is left to this manager."""
        subject = f"patch {name}"
        if self.applied is False:
            what = f"is registered by {self.plugin} ({self.place}), which has not applied it in this process"
            fix = "look for that package's own error in the log; vllm-graft has no part in this patch"
            return Finding("P008", "warning", subject, what, PATCHES_VARIABLE, fix)
        what = f"belongs to {self.plugin} ({self.place}) and is left to it: vllm-graft neither applies nor proves it"
        fix = f"offer it under the entry-point group vllm_graft.plugins of {self.plugin.package} to have it proven"
        return Finding("P007", "info", subject, what, PATCHES_VARIABLE, fix)


def general_plugins(environ: Mapping[str, str] | None = None) -> list[GeneralPlugin]:
    """The general plugins that vLLM loads, given ``VLLM_PLUGINS``, and that may register patches by name."""
    listed = (os.environ if environ is None else environ).get("VLLM_PLUGINS")
    allowed = None if listed is None else listed.split(",")
    found = []
    for entry in metadata.entry_points(group=GENERAL):
        package = entry.dist.name if entry.dist is not None else "an unnamed distribution"
        plugin = GeneralPlugin(entry.name, package, entry.module)
        if plugin.registers_patches and (allowed is None or entry.name in allowed):
            found.append(plugin)
    return sorted(found, key=str)


def undecided(name: str, plugins: Collection[GeneralPlugin]) -> Finding:
    """What is to be said of a name where no plugin has been loaded yet."""
    who = ", ".join(str(plugin) for plugin in plugins)
    what = f"is offered by no package; whether a general plugin registers it ({who}) shows only when vLLM loads them"
    return Finding(
        "P009", "warning", f"patch {name}", what, PATCHES_VARIABLE, "start it: a name nobody registers stops"
    )


def manager_of(name: str, plugins: Collection[GeneralPlugin]) -> Manager | None:
    """The manager of another package that has registered a patch under this name, or None.

    First those are asked that look like the guides' own: an object with a table ``available_patches``. Of packages with
    another kind, the sources decide: they read the variable and mention the name.
    """
    for plugin in plugins:
        for module in plugin.modules():
            for attribute, value in list(vars(module).items()):
                held = getattr(value, "__dict__", {})
                table = held.get("available_patches") if isinstance(held, Mapping) else None
                if isinstance(table, Collection) and name in table:
                    applied = held.get("applied_patches")
                    known = name in applied if isinstance(applied, Collection) else None
                    return Manager(plugin, f"{module.__name__}.{attribute}", known)
    for plugin in plugins:
        texts = {module.__name__: _source(module) for module in plugin.modules()}
        readers = [module for module, text in texts.items() if PATCHES_VARIABLE in text]
        if readers and any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts.values()):
            return Manager(plugin, readers[0], None)
    return None


def _source(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return ""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
