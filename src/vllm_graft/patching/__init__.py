"""Surgical changes to vLLM's classes and modules, for what no extension point reaches.

Writing a patch (``declaration.py``)::

    class Guard(VLLMPatch["vllm.v1.metrics.loggers:StatLoggerManager"], name="guard", vllm=">=0.26,<0.33"):
        @wrap
        def record(self, *args, **kwargs):
            return self._original_record(*args, **kwargs)

``wrap`` goes around upstream's code and reaches it by ``self._original_<name>`` or by a parameter named ``call`` right
after ``self``; ``replace`` takes its place; ``add`` puts something new beside it. Without a mark a hook wraps if it
reaches what is beneath, else replaces what is there, else adds. ``@min_vllm_version`` narrows a patch to later
releases. Functions, classmethods, staticmethods, properties and plain values can be patched, on classes and on
modules, under public, private and special names; ``super()`` works.

Applying patches (``engine.py``)::

    engine = Engine()
    engine.apply([Guard])       # all or nothing; targets not imported yet are armed
    engine.report()             # one HookState per hook: armed, applied, late, refused, reverted, and its hits
    engine.verify()             # what other code has done to the targets since
    engine.revert(Guard)        # any layer, exactly: the same objects are back

``Guard.apply()`` and ``Guard.revert()`` do so through ``default_engine()``. ``PatchManager`` (``manager.py``) registers
patches by name and reads ``VLLM_CUSTOM_PATCHES``. ``patchset_hash`` names a set of patches for compile caches.

The way of a patch, module by module: ``hooks.py`` reads its body and ``declaration.py`` its keywords; ``review.py``
chooses the bodies for the installed release and compares upstream's code with the fingerprints in ``lock.py``;
``conflicts.py`` compares it with other patches; ``target.py`` finds its class or module, or waits for the import;
``checks.py`` refuses what cannot work; ``patch_table.py`` plans the layers on each ``patched_attribute.py``, whose
functions ``surgery.py`` makes; ``report.py`` has its state and counts its hits. ``dry_run.py`` judges a patch without a
start, ``functions.py`` reads functions, and ``vllm_graft.sources`` vLLM's code from disk.
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.patching.declaration import (
        Declaration,
        Patch,
        VLLMPatch,
        add,
        min_vllm_version,
        patchset_hash,
        replace,
        wrap,
    )
    from vllm_graft.patching.engine import Engine, default_engine, set_default_engine
    from vllm_graft.patching.manager import PatchManager
    from vllm_graft.patching.report import HitCounter, HookState, LocalHitCounter

_NAMES = {
    "declaration": ("Declaration", "Patch", "VLLMPatch", "add", "min_vllm_version", "patchset_hash", "replace", "wrap"),
    "engine": ("Engine", "default_engine", "set_default_engine"),
    "manager": ("PatchManager",),
    "report": ("HitCounter", "HookState", "LocalHitCounter"),
}

__all__ = [
    "Declaration",
    "Engine",
    "HitCounter",
    "HookState",
    "LocalHitCounter",
    "Patch",
    "PatchManager",
    "VLLMPatch",
    "add",
    "default_engine",
    "min_vllm_version",
    "patchset_hash",
    "replace",
    "set_default_engine",
    "wrap",
]

_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
