"""Everything that replaces a name of vLLM: assignments, setattr, mock, pytest, wrapt, gorilla, patch classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vllm_graft.audit.model import PatchDeclaration, Use, Way
from vllm_graft.audit.uses.resolver import Resolver, dotted_of, entry_of
from vllm_graft.audit.uses.source_file import SourceFile
from vllm_graft.audit.uses.syntax import first_line, nodes
from vllm_graft.audit.uses.values import (
    TOP,
    LocalDef,
    MappingValue,
    Name,
    Scope,
    Values,
    local_defs,
    texts_in,
    vllm_names,
)
from vllm_graft.audit.uses.walk_state import Assignment, AttributeSpelling, ClassMember, FileUses, WalkState
from vllm_graft.errors import ConfigError
from vllm_graft.patching.functions import ORIGINAL
from vllm_graft.patching.hooks import BOOKKEEPING
from vllm_graft.patching.lock import NAME, Lock, ReviewedHooks
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

# Attributes of a function whose assignment changes the function.
_PARTS: Final = frozenset({"__code__", "__defaults__", "__kwdefaults__", "__func__"})
_SETTERS: Final = frozenset({"builtins.setattr", "builtins.type.__setattr__", "builtins.object.__setattr__"})
_DELETERS: Final = frozenset({"builtins.delattr", "builtins.type.__delattr__", "builtins.object.__delattr__"})
_MOCK: Final = ("unittest.mock.patch", "mock.patch", "mocker.patch")
_WRAPPERS: Final = frozenset(
    {"wrap_function_wrapper", "patch_function_wrapper", "transient_function_wrapper", "wrap_object"}
)
# Keywords of ``patch.multiple`` that name no attribute.
_MULTIPLE: Final = frozenset({"spec", "create", "spec_set", "autospec", "new_callable"})
MARKS: Final[dict[str, Way]] = {"wrap": "wrap", "replace": "replace", "add": "add"}
_OURS: Final = "VLLMPatch"
# Parameters by which a replacement gets the original.
_ORIGINALS: Final = frozenset({"call", "wrapped"})
_COPIERS: Final = frozenset({"functools.wraps", "functools.update_wrapper"})


def record_assignment(
    state: WalkState, target: ast.expr, expr: ast.expr | None, value: Values, *, way: Way | None = None
) -> bool:
    """Record an assignment to an attribute or entry; False where that is not vLLM's."""
    if isinstance(target, ast.Attribute):
        state.found.stored.add(target.attr)
        remember_original(state, target.attr, value)
        names = attributes(state.value(target.value), [target.attr])
        names = names or state.copies.get((dotted(target.value), target.attr), ())
    elif isinstance(target, ast.Subscript):
        keys = list(texts_in(state.value(target.slice)))
        for key in keys:
            remember_original(state, key, value)
        names = _entries(state.value(target.value), keys)
    else:
        return False
    return state.assign(names, target.lineno, expr, way=way, value=value)


def _entries(holders: Values, keys: list[str]) -> Values:
    """Return the entries of ``sys.modules`` and of namespaces that are meant."""
    found = (entry_of(one, key) for one in holders if isinstance(one, Name) for key in keys)
    return tuple(entry for entry in found if entry is not None)


def attributes(owner: Values, names: list[str]) -> Values:
    """Return the attributes of vLLM's that are meant, a function's code being the function."""
    return tuple(
        one if attribute in _PARTS else one.inside(attribute) for one in vllm_names(owner) for attribute in names
    )


def remember_original(state: WalkState, key: str, value: Values) -> None:
    """Record that something of vLLM's is also stored under another name from now on."""
    for one in vllm_names(value):
        state.found.saved.setdefault(key, set()).add(state.normal(one))


def patching_functions(state: WalkState, node: ast.Call, called: Values) -> list[tuple[LocalDef, dict[str, Values]]]:
    """Return the functions of the package that change an argument of vLLM's, each with the values of its parameters.

    An example is ``def put(cls, value): cls.name = value``. ``called`` is the value of the expression that is called.
    """
    found = []
    for own in local_defs(called):
        if isinstance(own.node, Function):
            given = arguments(state, node, own)
            upstream = {name for name, value in given.items() if any(vllm_names(value))}
            if upstream and not upstream.isdisjoint(_changed(own.node)):
                found.append((own, given))
    return found


def _changed(node: Function) -> set[str]:
    """Return the names whose attributes a function sets or deletes."""
    found: set[str] = set()
    for one in nodes(node):
        if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load):
            found.add(dotted(one.value).partition(".")[0])
        elif isinstance(one, ast.Call) and one.args and _last(one.func) in ("setattr", "delattr"):
            found.add(dotted(one.args[0]).partition(".")[0])
    return found


def arguments(state: WalkState, node: ast.Call, function: LocalDef) -> dict[str, Values]:
    """Return the values that a call gives to parameters, as far as they are visible."""
    if any(isinstance(one, ast.Starred) for one in node.args):
        return {}
    names = list(function.defaults)
    given = dict(zip(names, map(state.value, node.args), strict=False))
    return given | {one.arg: state.value(one.value) for one in node.keywords if one.arg in names}


def compared_copies(state: WalkState, test: ast.expr) -> dict[AttributeSpelling, Values]:
    """Return the attributes that a condition compares with a name of vLLM, with that name.

    ``if module.Request is Request: module.Request = Mine`` replaces copies of a name, module after module.
    """
    found: dict[AttributeSpelling, Values] = {}
    for one in nodes(test):
        if isinstance(one, ast.Compare) and len(one.ops) == 1 and isinstance(one.ops[0], (ast.Is, ast.Eq)):
            for place, other in ((one.left, one.comparators[0]), (one.comparators[0], one.left)):
                spelled = _attribute_spelling(place)
                if spelled is None:
                    continue
                # ``request.status == RequestStatus.WAITING`` compares a value; a copy has the name of its original.
                last = spelled[1]
                names = tuple(one for one in vllm_names(state.value(other)) if one.qualname.rpartition(".")[2] == last)
                if names:
                    found[spelled] = names
    return found


def _attribute_spelling(node: ast.expr) -> AttributeSpelling | None:
    """Return the owner and name in ``owner.name`` or ``getattr(owner, "name", ...)``."""
    if isinstance(node, ast.Attribute):
        return dotted(node.value), node.attr
    if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
        key = node.args[1]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            return dotted(node.args[0]), key.value
    return None


def record_call(
    state: WalkState, node: ast.Call, value: Values, own: LocalDef | None = None
) -> Sequence[ast.expr] | None:
    """Record a call that replaces names of vLLM, and return the arguments that are still to be walked.

    None where it is not such a call, or what it changes is not vLLM's. ``value`` is the value of the expression that is
    called, ``own`` the function that the call decorates.
    """
    called = dotted_of(value) or dotted(node.func)
    last = called.rpartition(".")[2]
    method = isinstance(node.func, ast.Attribute)
    if called in _SETTERS or (last == "setattr" and method):
        owner = _record_setattr(state, node)
    elif called in _DELETERS or (last == "delattr" and method):
        owner = _record_setattr(state, node, way="delete")
    elif last in ("setitem", "delitem"):
        # pytest's ``setitem(sys.modules, name, value)``.
        target = _entries(
            state.value(_argument(node, 0, "dic")), list(texts_in(state.value(_argument(node, 1, "name"))))
        )
        way: Way | None = "delete" if last == "delitem" else None
        done = state.assign(target, node.lineno, _argument(node, 2, "value"), way=way)
        owner = [*node.args[:1]] if done else None
    elif last in _WRAPPERS:
        owner = _record_wrapt(state, node, own)
    elif called.partition(".")[0] == "gorilla" and last in ("Patch", "patch"):
        owner = _record_gorilla(state, node, own)
    else:
        owner = _record_mock(state, node, called)
    if owner is None:
        return None
    return [one for one in (*node.args, *(keyword.value for keyword in node.keywords)) if one not in owner]


def record_decorator(state: WalkState, decorator: ast.expr, own: LocalDef) -> bool:
    """Record a decorator that replaces a name of vLLM by the function it decorates; False where it does not."""
    if not isinstance(decorator, ast.Call):
        return False
    value = state.value(decorator.func)
    called = dotted_of(value)
    if called != "gorilla.patch" and called.rpartition(".")[2] not in _WRAPPERS:
        return False
    return record_call(state, decorator, value, own) is not None


def _argument(node: ast.Call, place: int, *names: str) -> ast.expr | None:
    if place < len(node.args):
        return node.args[place]
    return next((keyword.value for keyword in node.keywords if keyword.arg in names), None)


# Each of these returns the arguments that name the target, or None where the target is not vLLM's.


def _record_setattr(state: WalkState, node: ast.Call, *, way: Way | None = None) -> list[ast.expr | None] | None:
    """Record ``setattr(owner, name, value)``, and pytest's ``setattr("dotted.name", value)``."""
    owner, name = _argument(node, 0, "target"), _argument(node, 1, "name")
    paths = list(texts_in(state.value(owner)))
    target: Values
    if paths:
        target, value = _spelled(paths), name
    else:
        names = list(texts_in(state.value(name)))
        state.found.spelled.update(names)
        target = attributes(state.value(owner), names)
        if not target and owner is not None:
            target = tuple(one for text in names for one in state.copies.get((dotted(owner), text), ()))
        value = _argument(node, 2, "value")
    return [owner] if state.assign(target, node.lineno, None if way == "delete" else value, way=way) else None


def _record_wrapt(state: WalkState, node: ast.Call, own: LocalDef | None) -> list[ast.expr | None] | None:
    """Record ``wrap_function_wrapper(module, name, wrapper)``; a question mark defers it until the module's import."""
    module, name = _argument(node, 0, "target", "module"), _argument(node, 1, "name")
    held = state.value(module)
    owners: Values = tuple(Name(text.rstrip("?")) for text in texts_in(held)) or held
    target = attributes(owners, list(texts_in(state.value(name))))
    wrapper = _argument(node, 2, "wrapper", "factory")
    value = (own,) if own is not None else ()
    return [module] if state.assign(target, node.lineno, wrapper, value=value, by="first") else None


def _record_gorilla(state: WalkState, node: ast.Call, own: LocalDef | None) -> list[ast.expr | None] | None:
    """Record ``Patch(destination, name, obj)``, or ``@patch(destination)`` on a function of that name."""
    destination, name = _argument(node, 0, "destination"), _argument(node, 1, "name")
    names = list(texts_in(state.value(name)))
    if not names and own is not None and not isinstance(own.node, ast.Lambda):
        names = [own.node.name]
    target = attributes(state.value(destination), names)
    expr = _argument(node, 2, "obj") if own is None else None
    value = (own,) if own is not None else ()
    return [destination] if state.assign(target, node.lineno, expr, value=value) else None


def _record_mock(state: WalkState, node: ast.Call, called: str) -> list[ast.expr | None] | None:
    """Record mock's ``patch``, ``patch.object``, ``patch.multiple`` and ``patch.dict(sys.modules, {...})``."""
    base = next((one for one in _MOCK if called.startswith(one)), None)
    if base is None or called.removeprefix(base)[:1] not in ("", "."):
        return None
    owner = _argument(node, 0, "target")
    held = state.value(owner)
    spelled = list(texts_in(held))
    owners = _spelled(spelled, whole=True) or held
    form, line, found = called.removeprefix(base), node.lineno, False
    if form == "":
        found = state.assign(_spelled(spelled), line, _argument(node, 1, "new"))
    elif form == ".object":
        names = list(texts_in(state.value(_argument(node, 1, "attribute"))))
        found = state.assign(attributes(owners, names), line, _argument(node, 2, "new"))
    elif form == ".multiple":
        given = [(one.arg, one.value) for one in node.keywords if one.arg and one.arg not in _MULTIPLE]
        done = [state.assign(attributes(owners, [name]), line, value) for name, value in given]
        found = any(done)
    elif form == ".dict" and (Name("sys", "modules") in held or "sys.modules" in spelled):
        tables = [one for one in state.value(_argument(node, 1, "values")) if isinstance(one, MappingValue)]
        pairs = [(text, value) for table in tables for key, value in table.pairs for text in texts_in(key)]
        done = [state.assign((Name(text),), line, value=value) for text, value in pairs]
        found = any(done)
    return [owner] if found else None


def _spelled(paths: Sequence[str], *, whole: bool = False) -> tuple[Name, ...]:
    """Return names of vLLM spelled with dots alone; classes are told from modules by their capitals.

    Without a capital the last part is a name in a module, or with ``whole`` it is the module.
    """
    found = []
    for path in paths:
        parts = path.split(".")
        if len(parts) > 1 and parts[0] == TOP:
            capital = (place for place, part in enumerate(parts) if part.lstrip("_")[:1].isupper())
            first = next(capital, len(parts) if whole else len(parts) - 1)
            found.append(Name(".".join(parts[:first]), ".".join(parts[first:])))
    return tuple(found)


def patch_targets(state: WalkState, base: ast.expr) -> Values:
    """Return what a base such as ``VLLMPatch["module:Class"]`` patches; empty where that is not vLLM's."""
    if not isinstance(base, ast.Subscript) or not _last(base.value).endswith("Patch"):
        return ()
    held = state.value(base.slice)
    spelled = tuple(Name(module, qualname) for text in texts_in(held) for module, _, qualname in [text.partition(":")])
    return tuple(vllm_names((*held, *spelled)))


def record_patch_class(state: WalkState, node: ast.ClassDef, target: Values, members: list[ClassMember]) -> None:
    """Record every hook of a patch class."""
    said = _said(state, node) if any(_is_ours(state, base) for base in node.bases) else None
    for member in members:
        if _is_hook(member):
            way, releases = _mark(member)
            # A hook of several bodies has one for each range of releases.
            patch = replace(said, releases=releases, marked=way is not None) if said is not None else None
            owner = said.name if said is not None else node.name
            before = len(state.found.assignments)
            expr = member.expr
            if isinstance(expr, ast.Call) and _last(expr.func) in MARKS and expr.args:
                # Of ``limit = replace(5)`` the 5.
                expr = expr.args[0]
            state.assign(attributes(target, [member.name]), member.line, expr, way=way, value=member.value, by="call")
            for assignment in state.found.assignments[before:]:
                assignment.patch = patch
                assignment.owner = owner if patch is not None else ".".join((*state.owner, owner))
                assignment.guard = assignment.guard.and_also(member.guard)


def _is_ours(state: WalkState, base: ast.expr) -> bool:
    """Return whether a base is vllm-graft's ``VLLMPatch``, and not another package's class of that name."""
    if not isinstance(base, ast.Subscript) or any(local_defs(state.value(base.value))):
        return False
    named = state.dotted(base.value) or dotted(base.value)
    return named in (_OURS, f"builtins.{_OURS}") or named.startswith("vllm_graft.")


def _said(state: WalkState, node: ast.ClassDef) -> PatchDeclaration:
    """Read the keywords of the class statement, and what ``min_vllm_version`` adds to them."""
    said = {keyword.arg: next(texts_in(state.value(keyword.value)), "") for keyword in node.keywords}
    vllm = said.get("vllm", "")
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and _last(one.func) == "min_vllm_version":
            least = "".join(f">={text}" for text in texts_in(state.value(one.args[0])))
            vllm = ",".join(filter(None, (vllm, least)))
    return PatchDeclaration(
        name=said.get("name") or node.name,
        line=node.lineno,
        vllm=vllm,
        locked=any(
            one.arg == "locked" and isinstance(one.value, ast.Constant) and one.value.value is True
            for one in node.keywords
        ),
        why=said.get("why", ""),
        upstream=said.get("upstream", ""),
        remove_when=said.get("remove_when", ""),
    )


def _is_hook(member: ClassMember) -> bool:
    if member.function is None:
        return not (member.name.startswith("__") and member.name.endswith("__"))
    node = member.function.node
    parts = node.decorator_list if isinstance(node, Function) else []
    # A property's setter belongs to its getter.
    return member.name not in BOOKKEEPING and not any(dotted(one).startswith(f"{member.name}.") for one in parts)


def _mark(member: ClassMember) -> tuple[Way | None, str]:
    """Return the way that a hook is marked with, and the releases that this body is for."""
    own = next(local_defs(member.value), None)
    given: list[ast.expr] = [member.expr] if member.expr is not None else []
    if own is not None and isinstance(own.node, Function):
        given += own.node.decorator_list
    for one in given:
        way = MARKS.get(_last(one.func if isinstance(one, ast.Call) else one))
        if way is not None and not (one is member.expr and not isinstance(one, ast.Call)):
            keywords = one.keywords if isinstance(one, ast.Call) else []
            ranges = [
                each.value.value for each in keywords if each.arg == "vllm" and isinstance(each.value, ast.Constant)
            ]
            return way, next((text for text in ranges if isinstance(text, str)), "")
    return None, ""


def _last(node: ast.expr) -> str:
    return dotted(node).rpartition(".")[2]


def use_of(assignment: Assignment, found: FileUses, resolver: Resolver) -> Use:
    """Return the use that an assignment makes, once all functions have been walked."""
    owns = list(local_defs(assignment.value)) or list(local_defs(resolver.value(assignment.expr, assignment.scope)))
    for each in owns:
        each.complete()
    own = owns[0] if owns and assignment.way != "delete" else None
    return Use(
        way=assignment.way or _way(assignment, owns, found, resolver),
        module=assignment.target.module,
        qualname=assignment.target.qualname,
        file=found.file.shown,
        line=assignment.line,
        owner=assignment.owner,
        guard=assignment.guard,
        alternatives=tuple((one.module, one.qualname) for one in assignment.alternatives),
        body=own.function if own is not None else None,
        body_file=own.file.shown if own is not None else "",
        source=source(own) if own is not None else "",
        patch=assignment.patch,
    )


def source(own: LocalDef) -> str:
    """Return the text of a function or class, decorators included."""
    if isinstance(own.node, ast.Lambda):
        return ast.get_source_segment(own.file.text, own.node) or ""
    first = first_line(own.node)
    return own.file.cut(first, own.node.end_lineno or first)


def _way(assignment: Assignment, owns: list[LocalDef], found: FileUses, resolver: Resolver) -> Way:
    functions = [own for own in owns if own.function is not None]
    if assignment.handed or (assignment.by == "first" and not functions):
        return "wrap"
    if assignment.by == "call" and any("call" in own.defaults for own in functions):
        return "wrap"
    reader = _OriginalSearch(assignment, found, resolver)
    return "wrap" if any(reader.calls(own) for own in functions) else "replace"


class _OriginalSearch:
    """Looks for calls of the original in its replacements."""

    def __init__(self, assignment: Assignment, found: FileUses, resolver: Resolver) -> None:
        self.target = assignment.target
        self.attribute = assignment.target.qualname.rpartition(".")[2]
        self.by = assignment.by
        self.found = found
        self.resolver = resolver

    def calls(self, own: LocalDef) -> bool:
        """Return whether a function visibly calls the original, or passes it on to something that may."""
        node = own.function
        if node is None:
            return False
        beneath = set(_beneath(node, first=self.by == "first"))
        scope = own.inside or own.scope
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and one.attr == f"{ORIGINAL}{self.attribute}":
                return True
            if isinstance(one, ast.Call) and self._reaches(one, scope, beneath):
                return True
        return False

    def _reaches(self, call: ast.Call, scope: Scope, beneath: set[str]) -> bool:
        if self.resolver.dotted(call.func, scope) in _COPIERS:
            return False
        given = [call.func, *call.args, *(keyword.value for keyword in call.keywords)]
        return any(self._is_original(one, scope, beneath) for one in given)

    def _is_original(self, node: ast.expr, scope: Scope, beneath: set[str]) -> bool:
        if isinstance(node, ast.Name) and node.id in beneath:
            return True
        if isinstance(node, ast.Attribute) and self.target in self.found.saved.get(node.attr, ()):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self.target in self.found.saved.get(str(node.slice.value), ())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__get__":
            return self._is_original(node.func.value, scope, beneath)
        here = self.target.dotted
        return any(
            isinstance(one, Name) and (one.dotted == here or one.dotted.startswith(f"{here}.__"))
            for one in self.resolver.value(node, scope)
        )


def _beneath(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, *, first: bool) -> Iterator[str]:
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    yield from (name for name in names if name in _ORIGINALS)
    if first and names:
        decorators = node.decorator_list if isinstance(node, Function) else []
        bound = names[0] in ("self", "cls") and not any(dotted(one) == "staticmethod" for one in decorators)
        yield from names[1:2] if bound else names[:1]


class Locks:
    """The lock files of one package, each read once; ``broken`` has the errors of those that cannot be read."""

    def __init__(self) -> None:
        self.broken: list[ConfigError] = []
        self._read: dict[Path, Mapping[str, ReviewedHooks]] = {}

    def reviewed(self, file: SourceFile, patch: str, hook: str) -> dict[str, str]:
        """Return the fingerprint of a hook's upstream code in each reviewed release."""
        seen = self._of(lock_of(file)).get(patch, {}).get(hook, {})
        return {release: str(fingerprint) for release, fingerprint in seen.items()}

    def _of(self, path: Path) -> Mapping[str, ReviewedHooks]:
        if path not in self._read:
            try:
                self._read[path] = Lock.read(path).patches
            except ConfigError as error:
                self.broken.append(error)
                self._read[path] = {}
        return self._read[path]


def lock_of(file: SourceFile) -> Path:
    """Return the lock file for the patches in a file, or the path where it would be."""
    folder = file.path.parent
    depth = len(file.module.split(".")) - (0 if file.is_package else 1)
    if not depth:
        return folder / f"{file.path.stem}.{NAME}"
    return next(
        (place / NAME for place in [folder, *folder.parents][:depth] if (place / NAME).is_file()), folder / NAME
    )
