"""Surgical changes to vLLM's classes and modules, for what no extension point reaches.

Writing a patch (``declare.py``)::

    class Guard(VLLMPatch["vllm.v1.metrics.loggers:StatLoggerManager"], name="guard", vllm=">=0.26,<0.33"):
        @wrap
        def record(self, *args, **kwargs):
            return self._original_record(*args, **kwargs)

``wrap`` stands around upstream's code and reaches it by ``self._original_<name>`` or by a parameter named ``call``
right after ``self``; ``replace`` takes its place; ``add`` puts something new beside it. Without a mark a hook wraps if
it reaches what is beneath, else replaces what is there, else adds. ``@min_vllm_version`` narrows a patch to later
releases. Functions, classmethods, staticmethods, properties and plain values can be patched, on classes and on
modules, under public, private and special names; ``super()`` works.

Applying patches (``engine.py``)::

    engine = Engine()
    engine.apply([Guard])       # all or nothing; targets not imported yet are armed
    engine.report()             # one HookState per hook: armed, applied, late, refused, reverted, and its hits
    engine.verify()             # what others have done to our targets since
    engine.revert(Guard)        # any layer, exactly: the same objects are back

``Guard.apply()`` and ``Guard.revert()`` do so through ``default_engine()``. ``PatchManager`` (``manager.py``) knows
patches by name and reads ``VLLM_CUSTOM_PATCHES``. ``patchset_hash`` names a set of patches for compile caches.

The other modules, from the bottom up: ``functions.py`` reads code objects, ``target.py`` finds classes and modules,
``hooks.py`` and ``marks.py`` read a patch's body, ``ranges.py`` compares versions, ``upstream/`` reads vLLM's code from
disk, ``lock.py`` and ``review.py`` hold it against what a person has read, ``neighbours.py`` knows who may stand beside
whom, ``checks.py``, ``signatures.py`` and ``unsound.py`` hold the rules, ``surgery.py`` and ``layers.py`` make
functions, ``caches.py`` keeps them behind ``functools.cache``, ``slot.py`` is the onion on one attribute, ``slots.py``
all of them, ``copies.py`` what other modules took from them, ``imports.py`` waits for modules, ``stack.py`` notices
what runs already, ``report.py`` and ``tally.py`` say what became of it all.
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.patching.declare import Declaration as Declaration
    from vllm_graft.patching.declare import Patch as Patch
    from vllm_graft.patching.declare import VLLMPatch as VLLMPatch
    from vllm_graft.patching.declare import min_vllm_version as min_vllm_version
    from vllm_graft.patching.engine import Engine as Engine
    from vllm_graft.patching.engine import default_engine as default_engine
    from vllm_graft.patching.engine import set_default_engine as set_default_engine
    from vllm_graft.patching.hashing import patchset_hash as patchset_hash
    from vllm_graft.patching.manager import PatchManager as PatchManager
    from vllm_graft.patching.marks import add as add
    from vllm_graft.patching.marks import replace as replace
    from vllm_graft.patching.marks import wrap as wrap
    from vllm_graft.patching.report import HookState as HookState
    from vllm_graft.patching.tally import LocalTally as LocalTally
    from vllm_graft.patching.tally import Tally as Tally

_HOME = {
    "Declaration": "declare",
    "Patch": "declare",
    "VLLMPatch": "declare",
    "add": "marks",
    "min_vllm_version": "declare",
    "replace": "marks",
    "wrap": "marks",
    "Engine": "engine",
    "default_engine": "engine",
    "set_default_engine": "engine",
    "patchset_hash": "hashing",
    "PatchManager": "manager",
    "HookState": "report",
    "LocalTally": "tally",
    "Tally": "tally",
}

__all__ = [
    "Declaration",
    "Engine",
    "HookState",
    "LocalTally",
    "Patch",
    "PatchManager",
    "Tally",
    "VLLMPatch",
    "add",
    "default_engine",
    "min_vllm_version",
    "patchset_hash",
    "replace",
    "set_default_engine",
    "wrap",
]


__getattr__ = loader(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
