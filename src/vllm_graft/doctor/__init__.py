"""Why is a plugin not active? Rules over what is installed and what is set, each for one way that vLLM loses plugins.

::

    facts = Facts.gather(arguments=["--speculative-config", "..."])
    findings = examine(facts)                # the cheap rules: metadata, files and environment; nothing is imported
    findings += examine_imports(facts)       # each plugin imported in a child of its own

facts.py      what the rules look at, gathered once: distributions, entry points, variables, arguments, versions
packages.py   distributions as importlib sees them, with what shadows what
arguments.py  what vLLM would be told: the few arguments that matter to plugins
source.py     what an entry point's object is, by reading its module
modules.py    which names a module binds, and by which statement
platforms.py  which platform plugins vLLM would ask
engine.py     which runner and which scheduling an engine would have
resolvers.py  LoRA resolvers: which would resolve something
plans.py      what vllm-graft itself is asked to do, and what is wrong with it
rules/        one rule per file: CODE, TITLE, check(facts)
summary.py    what is installed, what will load where, what will not and why
children.py   plugins imported one by one in child processes, with their time and what they pulled in
child.py      what runs in such a child
processes.py  a child that is ended with all its own, whatever it does
"""

from __future__ import annotations

from vllm_graft.doctor.examine import examine as examine
from vllm_graft.doctor.facts import Facts as Facts

__all__ = ["Facts", "examine"]
