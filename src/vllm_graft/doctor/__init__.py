"""Find out why a plugin is not active: rules over what is installed and what is set, without starting vLLM.

::

    env = Environment.gather(arguments=["--speculative-config", "..."])
    findings = examine(env)                # the rules: metadata, files and variables; no plugin is imported
    findings += examine_imports(env)       # each plugin imported in a child process of its own

environment.py    what the rules examine, gathered once: distributions, entry points, variables, arguments, vLLM
rules/            one rule per file: CODE, TITLE, check(env)
server.py    the server that would start: platform, model runner, scheduling, LoRA resolvers
classes.py        class hierarchies, read from sources
interpreter.py    a plugin's function interpreted without running it
plans.py          the plan of vllm-graft, and its faults
summary.py        a row per plugin: which processes load it, or why none does
imports.py        plugins imported one by one, with their time and what they pull in
import_child.py   the script of such a child process
child_process.py  a child process that ends with everything it started
"""

from __future__ import annotations

from vllm_graft.doctor.environment import Environment as Environment
from vllm_graft.doctor.rules import examine as examine

__all__ = ["Environment", "examine"]
