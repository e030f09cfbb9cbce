"""D007: an entry point that names a module or an object that is not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vllm_graft.doctor import plans
from vllm_graft.doctor.environment import GROUPS, OURS, EntryPoint, Environment
from vllm_graft.errors import nearest
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.modules import Missing, SourceModule
from vllm_graft.sources.scopes import Namespace

CODE = "D007"
TITLE = "An entry point whose module or object is not there"


def check(env: Environment) -> Iterator[Finding]:
    """Judge by the files alone, and only where they are certain."""
    for entry in env.in_group(*GROUPS, OURS):
        found = env.module(entry.module)
        lacking = found.why if isinstance(found, Missing) else _lacking(found, entry, env) if found else ""
        if lacking:
            what = f"{entry.value} cannot be loaded: {lacking}; {_consequence(env, entry)}"
            fix = f"correct the entry point and install {entry.package} again"
            level: Level = "error" if plans.loads(env, entry) else "warning"
            yield Finding(CODE, level, entry.subject, what, f"{entry.where} [{entry.group}]", fix)


def _lacking(module: SourceModule, entry: EntryPoint, env: Environment) -> str:
    first, _, rest = entry.attribute.partition(".")
    lacking = unbound(env, module, first) if first else ""
    if lacking or not first:
        return lacking
    kind = module.namespace.only(first)
    if rest and isinstance(kind, ast.ClassDef) and not (kind.bases or kind.keywords or kind.decorator_list):
        held = Namespace(kind)
        name = rest.partition(".")[0]
        if held.is_closed and name not in held.bound and not hasattr(object, name):
            return f"the class {first} in {module.file.path} has no {name!r}"
    return ""


def unbound(env: Environment, module: SourceModule, name: str) -> str:
    """Say that a module does not bind a name; empty where it does, or where reading does not tell."""
    names = module.namespace
    if not names.is_closed or name in names.bound:
        return ""
    # ``package:module`` is valid for a submodule that has been imported.
    if module.file.is_package and not isinstance(env.module(f"{module.name}.{name}"), Missing):
        return ""
    public = [each for each in names.bound if not each.startswith("_")]
    return f"{module.file.path} binds no {name!r}{nearest(name, public)}"


def _consequence(env: Environment, entry: EntryPoint) -> str:
    if entry.group == OURS:
        return "a plan that names it is refused"
    if not env.loads(entry):
        return "as VLLM_PLUGINS is, vLLM does not try, so nobody notices yet"
    if entry.group == "vllm.logits_processors":
        return "vLLM refuses to start with it"
    if entry.group == "vllm.io_processor_plugins":
        return "a server that is told to use it does not start"
    # load_plugins_by_group catches every Exception of an import (vllm/plugins/__init__.py).
    return "vLLM logs a traceback and goes on without it"
