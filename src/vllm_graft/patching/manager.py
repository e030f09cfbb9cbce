"""Patches by name: a register, and the environment variable that picks from it."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from vllm_graft.errors import ConfigError, ConflictError, GraftError, nearest
from vllm_graft.patching.declare import Patch, declared
from vllm_graft.patching.engine import Engine, default_engine

logger = logging.getLogger(__name__)

CUSTOM_PATCHES = "VLLM_CUSTOM_PATCHES"
"""The environment variable with the names of patches, separated by commas; ``*`` stands for all."""


_registered: dict[str, list[Patch]] = {}


def registered() -> list[tuple[str, Patch]]:
    """Every name under which a manager of the default engine knows a patch in this process."""
    return [(name, patch) for name, patches in _registered.items() for patch in patches]


class _on_class_too:
    """A method that can be called on the class as well, with None in the place of ``self``."""

    def __init__(self, method: Callable[[Any, str], bool]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[[str], bool]:
        return functools.partial(self._method, instance)


class PatchManager:
    """Registers patches under names and applies those that are asked for.

    What goes wrong is logged and raised; with ``strict=False`` it is logged and ``apply_patch`` returns False.
    """

    def __init__(self, engine: Engine | None = None, *, strict: bool = True) -> None:
        self.strict = strict
        self.available_patches: dict[str, Patch] = {}
        self._engine = engine
        self._asked: dict[str, None] = {}

    @property
    def engine(self) -> Engine:
        """The engine that applies: the one given, or the process's default."""
        return default_engine() if self._engine is None else self._engine

    @property
    def applied_patches(self) -> list[str]:
        """The names that were applied and still are, in the order of application."""
        return [name for name in self._asked if self.is_applied(name)]

    def register(self, name: str, patch_class: Patch) -> None:
        """Make a patch known under a name; the same patch may be registered again."""
        known = self.available_patches.setdefault(name, declared(patch_class))
        if known is not patch_class:
            raise ConflictError(
                f"the name {name!r} stands for {known.declaration.defined_in} already",
                where=patch_class.declaration.where,
                fix="register it under another name",
            )
        if self._engine is None and patch_class not in _registered.setdefault(name, []):
            _registered[name].append(patch_class)
        logger.debug("registered patch %s", name)

    @_on_class_too
    def is_applied(self: PatchManager | None, name: str) -> bool:
        """Whether the patch of this name stands on its target or waits for it to be imported.

        ``PatchManager.is_applied(name)``, on the class, asks by the name in the patch's declaration, whoever applied
        it through the process's default engine.
        """
        if self is None:
            return any(patch.declaration.name == name for patch in default_engine().active())
        patch = self.available_patches.get(name)
        return patch is not None and self.engine.is_active(patch)

    def apply_patch(self, name: str) -> bool:
        """Apply one patch by its name; applying it again changes nothing."""
        try:
            self.engine.apply([self._known(name)])
        except GraftError as error:
            logger.error("%s", error)
            if self.strict:
                raise
            return False
        self._asked[name] = None
        return True

    def apply_from_env(self) -> None:
        """Apply the patches that ``VLLM_CUSTOM_PATCHES`` names.

        While vLLM loads general plugins, a name that is not registered here is left to others, and said: another plugin
        may register it yet. When the engine's arguments are read, the name that nobody has registered stops the start.
        """
        names = [name.strip() for name in os.environ.get(CUSTOM_PATCHES, "").split(",") if name.strip()]
        if "*" in names:
            names = list(self.available_patches)
        others = [name for name in names if name not in self.available_patches and _vllm_loads_plugins()]
        for name in names:
            if name not in others:
                self.apply_patch(name)
        if others:
            # Where vLLM does not load vllm-graft, nobody looks at these names again.
            level = logging.DEBUG if _start_checks_names() else logging.WARNING
            logger.log(
                level, "%s: not registered here and left to other packages: %s", CUSTOM_PATCHES, ", ".join(others)
            )
        logger.info("patches active: %s", ", ".join(self.applied_patches) or "none")

    def _known(self, name: str) -> Patch:
        if name in self.available_patches:
            return self.available_patches[name]
        raise ConfigError(
            f"there is no patch {name!r}{nearest(name, self.available_patches)}",
            where=CUSTOM_PATCHES,
            fix="name a registered patch, or register this one first",
        )


def _vllm_loads_plugins() -> bool:
    """Whether this is called by a general plugin, from vLLM's own loop over them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "load_general_plugins" and frame.f_globals.get("__name__") == "vllm.plugins":
            return True
        frame = frame.f_back
    return False


def _start_checks_names() -> bool:
    """Whether vLLM loads vllm-graft too, whose start refuses a name that nobody registers."""
    listed = os.environ.get("VLLM_PLUGINS")
    off = os.environ.get("GRAFT_DISABLE", "").strip().lower() not in ("", "0", "false", "no")
    return not off and (listed is None or "graft" in listed.split(","))
