"""Python sources read from disk without importing them: where a name is defined, and a fingerprint of its code.

::

    source = Installed()                                       # or Tree(folder), or Wheel(file)
    found = find(source, "vllm.v1.core.sched.scheduler", "Scheduler.schedule")
    found.fingerprint                                          # s:1f3a5b7c9d0e2f40 b:8a6c4e2f0b1d3597
    found.text                                                 # its source, for a person

The same code reads the installed vLLM, a source tree, a wheel, and the packages of plugins.

locate.py       find_spec(): a module's file by its name, without importing the packages above it
origins.py      where modules are read from, and how: Installed, Tree, Wheel, SearchPath
scopes.py       the names that a module or class body binds, and the statements that bind them
modules.py      SourceModule: one module, parsed; Definition: a name in it with its text
finder.py       Finder and find(): the definition of a name, through re-exports and base classes
fingerprint.py  Fingerprint: hashes of a definition's signature and body
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.sources.finder import Finder as Finder
    from vllm_graft.sources.finder import find as find
    from vllm_graft.sources.fingerprint import Fingerprint as Fingerprint
    from vllm_graft.sources.modules import Definition as Definition
    from vllm_graft.sources.origins import Installed as Installed
    from vllm_graft.sources.origins import Source as Source
    from vllm_graft.sources.origins import Tree as Tree
    from vllm_graft.sources.origins import Wheel as Wheel

__all__ = ["Definition", "Finder", "Fingerprint", "Installed", "Source", "Tree", "Wheel", "find"]

_HOMES = {
    "Definition": "modules",
    "Finder": "finder",
    "Fingerprint": "fingerprint",
    "Installed": "origins",
    "Source": "origins",
    "Tree": "origins",
    "Wheel": "origins",
    "find": "finder",
}

__getattr__ = loader(__name__, _HOMES)
