"""Judge a patch without a start: by reading vLLM's sources, and by applying it in a child process.

Reading raises the refusals of ``checks.py`` before vLLM is imported, for ``vllm-graft plan`` and ``vllm-graft lock``.
It refuses only what it is certain of: a name that a decorator, a module's ``__getattr__`` or a base class without a
source may provide is left open. If reading leaves something open, a trial decides: a child process imports the
target's module, applies the patch to it through the engine that a start uses, and ends.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import operator
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from vllm_graft.errors import PatchError
from vllm_graft.patching import checks
from vllm_graft.patching.declaration import Declaration, Patch, as_patch
from vllm_graft.patching.functions import KEEPING, kind_in_source, parameters_in_source
from vllm_graft.patching.hooks import Hook
from vllm_graft.patching.target import refuse_missing_name, refuse_non_class
from vllm_graft.sources.finder import Finder
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.modules import ScopeEntry, SourceModule
from vllm_graft.sources.scopes import decorators, dotted

Presence = Literal["present", "absent", "unknown"]

_HARMLESS: Final = frozenset({"dataclass", "final", "runtime_checkable", "config", "total_ordering"})
"""Decorators of classes that add no method other than special ones."""

_METACLASSES: Final = frozenset({"ABCMeta", "_ProtocolMeta"})
_EMPTY_BASES: Final = frozenset({"ABC", "Generic", "Protocol"})
"""Bases without methods of their own; from Python 3.12 on some of ``typing`` are made in C and cannot be read."""


def check_by_reading(declaration: Declaration, bodies: Sequence[Hook], finder: Finder) -> bool:
    """Raise the TargetError that a start would raise on these sources, as far as reading is certain of it.

    Returns False if a start may still refuse the patch, because reading cannot decide what is there.
    """
    module = finder.module(declaration.target.module)
    if module is None or declaration.target.given is not None:
        return False
    owner = _owner(declaration, finder, module)
    if owner == "unknown":
        return False
    sure = [_check_hook(declaration, hook, finder, module, owner) for hook in bodies]
    return all(sure)


def _owner(declaration: Declaration, finder: Finder, module: SourceModule) -> ScopeEntry | Literal["unknown"] | None:
    """Return the class that is patched, None for a module; raise TargetError if it is missing or not a class."""
    target = declaration.target
    done: list[str] = []
    for part in target.qualname.split(".") if target.is_class else ():
        found = finder.walk.find(module.name, ".".join([*done, part]))
        if found is None:
            above = finder.walk.find(module.name, ".".join(done)) if done else None
            if _judge_presence(finder, module, above[0] if above is not None else None, part) != "absent":
                return "unknown"
            names = module.scope if above is None else _names(finder, above[0])
            raise refuse_missing_name(target, declaration.where, done, part, list(names))
        done.append(part)
    if not done:
        return None
    place = found[0] if found is not None else None
    if place is not None and place.cls is None:
        if place.kind == "function" and _is_plain(place):
            raise refuse_non_class(target, declaration.where, "function", done)
        return "unknown"
    return place if place is not None else "unknown"


def _check_hook(
    declaration: Declaration, hook: Hook, finder: Finder, module: SourceModule, owner: ScopeEntry | None
) -> bool:
    target = declaration.target
    found = finder.walk.find(module.name, target.inside(hook.attribute))
    place = found[0] if found is not None else None
    there: Presence = "present"
    if owner is None and hook.attribute in module.on_demand:
        # A patch changes the module's own attributes, and ``vllm.envs`` has none of its variables among them, unless
        # its ``__getattr__`` stores what it provides.
        text = module.file.text
        stored = "globals()" in text or "setattr" in text or f"global {hook.attribute}" in text
        is_module = finder.module(f"{module.name}.{hook.attribute}") is not None
        place, there = None, "unknown" if stored or is_module else "absent"
    elif place is None:
        there = _judge_presence(finder, module, owner, hook.attribute)
    if place is not None and all(isinstance(node, ast.AnnAssign) and node.value is None for node in place.nodes):
        # An annotation alone makes no attribute, unless a base turns it into one.
        return False
    if there == "unknown":
        return False
    if hook.kind == "add" and there == "present":
        raise checks.refused(declaration, checks.refuse_addition(hook.attribute))
    if hook.kind in ("wrap", "replace") and there == "absent":
        names = module.scope if owner is None else _names(finder, owner)
        raise checks.refused(declaration, checks.refuse_absent(hook, list(names)))
    if place is not None and owner is not None and hook.form == "value" and hook.kind != "add":
        bases = {base.rpartition(".")[2] for one in finder.walk.line(owner) for base in one.bases}
        if bases & checks.ENUMS:
            raise checks.refused(declaration, checks.refuse_enum_value(hook.attribute, owner.qualname))
    if place is None and there == "present":
        # A submodule, which is neither a function nor a plain value.
        return False
    if place is None or hook.kind == "add":
        # A value may be a field that the class captured when it was made, which shows only on the loaded class.
        return hook.form != "value" or owner is None
    return _check_kind(declaration, hook, place, in_class=owner is not None)


def _check_kind(declaration: Declaration, hook: Hook, place: ScopeEntry, *, in_class: bool) -> bool:
    """Refuse an attribute of another form or kind than the hook: a value, a property, a coroutine."""
    if len(place.nodes) > 1 and place.kind != "property":
        return False
    node = place.nodes[-1]
    form = _form(place)
    if form is not None and form != hook.form:
        raise checks.refused(declaration, checks.refuse_form(hook, form))
    if isinstance(node, Function) and hook.form == (form or place.kind) and hook.form not in ("property", "value"):
        made = kind_in_source(node)
        refusal = checks.refuse_function_kind(hook, [made]) if made is not None else None
        if form is not None:
            refusal = refusal or checks.refuse_signature(hook, in_class, parameters_in_source(node.args))
        if refusal is not None:
            raise checks.refused(declaration, refusal)
    if form is None:
        return False
    # Left open: a property may lack an accessor, and a class captures validators and the defaults of fields.
    validates = any("validator" in mark or "serializer" in mark for mark in decorators(node))
    captured = in_class and (hook.form in ("property", "value") or validates)
    return not captured


def _form(place: ScopeEntry) -> checks.UpstreamForm | None:
    """Return the form of a definition, or None if reading is not certain of it."""
    node = place.nodes[-1]
    if isinstance(node, ast.ClassDef):
        return "class"
    if isinstance(node, Function):
        return place.kind if place.kind != "class" and _is_plain(place) else None
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return "value" if isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set) else None


def _is_plain(place: ScopeEntry) -> bool:
    return all(decorators(node) <= KEEPING for node in place.nodes)


def _judge_presence(finder: Finder, module: SourceModule, owner: ScopeEntry | None, attribute: str) -> Presence:
    """Judge whether a name that no statement defines exists anyway."""
    if attribute.startswith("__") and attribute.endswith("__"):
        return "unknown"
    if owner is not None:
        return "absent" if _is_closed(finder, owner, attribute) else "unknown"
    if "__getattr__" in module.scope or finder.walk.leads_out(module.name, attribute):
        return "unknown"
    if any(finder.module(star) is None for star in module.stars):
        return "unknown"
    if finder.module(f"{module.name}.{attribute}") is not None or finder.walk.module_at(module.name, attribute):
        return "present"
    # A loop, ``global`` and ``globals()`` bind names that no statement at the module's top level shows; a module such
    # as ``transformers`` puts another object in its place.
    told = any(isinstance(node, ast.For | ast.While) for node in module.body)
    told = told or "sys.modules[__name__]" in module.file.text
    return "unknown" if told or attribute in module.file.text else "absent"


def _is_closed(finder: Finder, owner: ScopeEntry, attribute: str) -> bool:
    """Return whether every class above was read, and none has a decorator or metaclass that may add attributes."""
    for place in finder.walk.line(owner):
        cls = place.cls
        metas = {dotted(one.value).rpartition(".")[2] for one in cls.keywords} if cls is not None else set()
        if cls is None or not metas <= _METACLASSES or not decorators(cls) <= _HARMLESS:
            return False
        for name in place.bases:
            if finder.walk.base(place.module, name) is not None or name.rpartition(".")[2] in _EMPTY_BASES:
                continue
            built_in = getattr(builtins, name, None)
            if not isinstance(built_in, type) or hasattr(built_in, attribute):
                return False
    return True


def _names(finder: Finder, owner: ScopeEntry) -> list[str]:
    line = finder.walk.line(owner)
    return [name for place in line if place.cls is not None for name in place.module.class_scope(place.cls)]


_LIMIT: Final = 300  # the time limit of a trial in seconds; importing vLLM takes a dozen on an idle machine
_NO_LOCKS: Final = "--no-locks"
_RESULT: Final = "vllm-graft trial: "  # the prefix of the line with the result: vLLM prints lines of its own


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial: refused with ``what`` and ``fix``, or impossible for the reason in ``failed``."""

    what: str = ""
    fix: str = ""
    failed: str = ""


def try_in_child(target: str, beneath: Sequence[str] = (), *, locks: bool = True) -> TrialResult:
    """Apply a patch in a child process, over those ``beneath``; each is named "module:Class", as by its entry point.

    Without ``locks`` they may stand on any upstream code.
    """
    words = [target, *beneath, *([] if locks else [_NO_LOCKS])]
    command = [sys.executable, "-m", "vllm_graft.patching.dry_run", *words]
    # The patch was found on the import path of this process, which a new process may not have.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return TrialResult(failed=str(error))
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not lines:
        return TrialResult(failed=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return TrialResult(**json.loads(lines[-1].removeprefix(_RESULT)))


def try_here(target: str, *beneath: str, locks: bool = True) -> TrialResult:
    """Apply a patch in this process; one beneath that is refused is left out."""
    from vllm_graft.patching.engine import Engine

    patch = _load(target)
    try:
        if patch.declaration.target.given is None:
            importlib.import_module(patch.declaration.target.module)
    except Exception as error:  # the module's own code may raise anything
        return TrialResult(failed=f"{patch.declaration.target.module} cannot be imported: {error!r}")
    engine = Engine(locks=locks)
    for other in map(_load, beneath):
        with contextlib.suppress(PatchError):
            engine.apply([other])
    try:
        engine.apply([patch])
    except PatchError as error:
        return TrialResult(what=error.what, fix=error.fix)
    return TrialResult()


def _load(target: str) -> Patch:
    module, _, name = target.partition(":")
    return as_patch(operator.attrgetter(name)(importlib.import_module(module)))


if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word != _NO_LOCKS]
    print(_RESULT + json.dumps(asdict(try_here(*named, locks=_NO_LOCKS not in sys.argv))), flush=True)
