"""Patches by name: a registry, and the environment variable that picks from it."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from vllm_graft.errors import ConfigError, ConflictError, GraftError, join, nearest
from vllm_graft.patching.declaration import Patch, as_patch
from vllm_graft.patching.engine import Engine, default_engine
from vllm_graft.points import PATCHES_VARIABLE, custom_patches
from vllm_graft.switches import allowed_plugins, disabled

logger = logging.getLogger("vllm.graft")

_registered: dict[str, list[Patch]] = {}


def registered() -> list[tuple[str, Patch]]:
    """Return every name under which a manager of the default engine has registered a patch, and the patch."""
    return [(name, patch) for name, patches in _registered.items() for patch in patches]


class _on_class_too:
    """A method that can be called on the class too, with None in place of ``self``."""

    def __init__(self, method: Callable[[Any, str], bool]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[[str], bool]:
        return functools.partial(self._method, instance)


class PatchManager:
    """Registers patches under names, and applies them by name.

    An error is logged and raised; with ``strict=False`` it is logged, and ``apply_patch`` returns False.
    """

    def __init__(self, engine: Engine | None = None, *, strict: bool = True) -> None:
        self.strict = strict
        self.available_patches: dict[str, Patch] = {}
        self._engine = engine
        self._requested: dict[str, None] = {}

    @property
    def engine(self) -> Engine:
        """The engine that applies the patches: the one passed in, or the process's default."""
        return default_engine() if self._engine is None else self._engine

    @property
    def applied_patches(self) -> list[str]:
        """The names of the patches that were applied and still are, in the order of application."""
        return [name for name in self._requested if self.is_applied(name)]

    def register(self, name: str, patch_class: Patch) -> None:
        """Register a patch under a name; the same patch may be registered again."""
        known = self.available_patches.setdefault(name, as_patch(patch_class))
        if known is not patch_class:
            what = f"the name {name!r} stands for {known.declaration.defined_in} already"
            raise ConflictError(what, where=patch_class.declaration.where, fix="register it under another name")
        if self._engine is None and patch_class not in _registered.setdefault(name, []):
            _registered[name].append(patch_class)
        logger.debug("registered patch %s", name)

    @_on_class_too
    def is_applied(self: PatchManager | None, name: str) -> bool:
        """Return whether the patch of this name is on its target, or armed.

        ``PatchManager.is_applied(name)``, on the class, goes by the name in the patch's declaration, and covers every
        patch of the process's default engine.
        """
        if self is None:
            return any(patch.declaration.name == name for patch in default_engine().active())
        patch = self.available_patches.get(name)
        return patch is not None and self.engine.is_active(patch)

    def apply_patch(self, name: str) -> bool:
        """Apply one patch by its name; applying it again changes nothing."""
        try:
            if name not in self.available_patches:
                what = f"there is no patch {name!r}{nearest(name, self.available_patches)}"
                fix = "name a registered patch, or register this one first"
                raise ConfigError(what, where=PATCHES_VARIABLE, fix=fix)
            self.engine.apply([self.available_patches[name]])
        except GraftError as error:
            logger.error("%s", error)
            if self.strict:
                raise
            return False
        self._requested[name] = None
        return True

    def apply_from_env(self) -> None:
        """Apply the patches that ``VLLM_CUSTOM_PATCHES`` names; the error names each that was refused.

        While vLLM loads general plugins, a name that is not registered here is logged and left to other plugins, which
        may register it yet. A name that no plugin has registered stops the start when the engine's arguments are read.
        """
        names = custom_patches() or []
        if "*" in names:
            names = list(self.available_patches)
        others = [name for name in names if name not in self.available_patches and _vllm_loads_plugins()]
        failures: list[GraftError] = []
        for name in names:
            try:
                if name not in others:
                    self.apply_patch(name)
            except GraftError as error:
                failures.append(error)
        if failures:
            raise join(failures)
        if others:
            # A start refuses a name that no plugin registers, but only if vLLM loads vllm-graft.
            allowed = allowed_plugins()
            checked = not disabled() and (allowed is None or "graft" in allowed)
            what = f"{PATCHES_VARIABLE}: not registered here and left to other packages: {', '.join(others)}"
            logger.log(logging.DEBUG if checked else logging.WARNING, "%s", what)
        logger.info("patches active: %s", ", ".join(self.applied_patches) or "none")


def _vllm_loads_plugins() -> bool:
    """Return whether a general plugin is calling, from vLLM's own loop over them."""
    # vLLM tells a plugin nothing of its surroundings: the function is called without arguments.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "load_general_plugins" and frame.f_globals.get("__name__") == "vllm.plugins":
            return True
        frame = frame.f_back
    return False
