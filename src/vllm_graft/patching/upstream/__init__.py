"""Upstream's code as it lies on disk: where a name is defined, and a fingerprint of what is there.

::

    source = Installed()                                       # or Tree(folder), or Wheel(file)
    found = find(source, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    found.fingerprint                                          # s:1f3a5b7c9d0e2f40 b:8a6c4e2f0b1d3597
    found.text                                                 # its source, for a person

Nothing of upstream is imported or run, and the same code reads the running vLLM, a source tree and a wheel.

sources.py      where modules are read from: Installed, Tree, Wheel
scopes.py       which names a module or class body binds, and how
finder.py       find(): the definition of a name
walk.py         the way there: through re-exports and base classes
fingerprint.py  Fingerprint: what is hashed of a definition and what is not
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.patching.upstream.finder import Definition as Definition
    from vllm_graft.patching.upstream.finder import find as find
    from vllm_graft.patching.upstream.fingerprint import Fingerprint as Fingerprint
    from vllm_graft.patching.upstream.sources import Installed as Installed
    from vllm_graft.patching.upstream.sources import Source as Source
    from vllm_graft.patching.upstream.sources import Tree as Tree
    from vllm_graft.patching.upstream.sources import Wheel as Wheel

__all__ = ["Definition", "Fingerprint", "Installed", "Source", "Tree", "Wheel", "find"]

_HOMES = {
    "Definition": "finder",
    "Fingerprint": "fingerprint",
    "Installed": "sources",
    "Source": "sources",
    "Tree": "sources",
    "Wheel": "sources",
    "find": "finder",
}

__getattr__ = loader(__name__, _HOMES)
