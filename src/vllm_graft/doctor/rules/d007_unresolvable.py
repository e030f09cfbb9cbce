"""D007: an entry point that names a module or an object that is not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vllm_graft.doctor import plans
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.modules import Missing, Module, read
from vllm_graft.doctor.packages import GROUPS, OURS, Entry
from vllm_graft.errors import nearest
from vllm_graft.findings import Finding

CODE = "D007"
TITLE = "An entry point whose module or object is not there"


def check(facts: Facts) -> Iterator[Finding]:
    """Told by the files alone, and only where they are certain."""
    for entry in facts.in_group(*GROUPS, OURS):
        found = read(entry.module, facts.path)
        lacking = found.why if isinstance(found, Missing) else _lacking(found, entry, facts) if found else ""
        if lacking:
            yield Finding(
                CODE,
                "error" if plans.loads(facts, entry) else "warning",
                f"plugin {entry.name!r} of {entry.package}",
                f"{entry.value} cannot be loaded: {lacking}; {_consequence(facts, entry)}",
                f"{entry.where} [{entry.group}]",
                f"correct the entry point and install {entry.package} again",
            )


def _lacking(module: Module, entry: Entry, facts: Facts) -> str:
    first, _, rest = entry.attribute.partition(".")
    if not first or not module.closed:
        return ""
    if first not in module.bound:
        if module.is_package and not isinstance(read(f"{module.name}.{first}", facts.path), Missing):
            return ""
        public = [name for name in module.bound if not name.startswith("_")]
        return f"{module.file} binds no {first!r}{nearest(first, public)}"
    kind = module.only(first)
    if rest and isinstance(kind, ast.ClassDef) and not (kind.bases or kind.keywords or kind.decorator_list):
        held = Module(module.name, module.file, ast.Module(kind.body, []), False, ())
        name = rest.partition(".")[0]
        if held.closed and name not in held.bound and not hasattr(object, name):
            return f"the class {first} in {module.file} has no {name!r}"
    return ""


def _consequence(facts: Facts, entry: Entry) -> str:
    if entry.group == OURS:
        return "a plan that names it is refused"
    if not facts.loads(entry):
        return "as VLLM_PLUGINS is, vLLM does not try, so nobody notices yet"
    if entry.group == "vllm.logits_processors":
        return "vLLM refuses to start with it"
    if entry.group == "vllm.io_processor_plugins":
        return "a server that is told to use it does not start"
    return "vLLM logs a traceback and goes on without it"
