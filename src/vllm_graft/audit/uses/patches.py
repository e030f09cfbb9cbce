"""Everything that replaces a name of vLLM: assignments, setattr, mock, pytest, wrapt, gorilla, patch classes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vllm_graft.audit.model import PatchDeclaration, Use, Way
from vllm_graft.audit.uses.resolver import Resolver, dotted_of, entries_of
from vllm_graft.audit.uses.source_file import SourceFile
from vllm_graft.audit.uses.syntax import first_line, nodes
from vllm_graft.audit.uses.values import TOP, LocalDef, MappingValue, Name, Values, local_defs, texts_in, vllm_names
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
# The last parts of the names of functions that change something, but for those of mock.
_CHANGING: Final = _WRAPPERS.union(
    ("setattr", "__setattr__", "delattr", "__delattr__", "setitem", "delitem", "Patch", "patch", "extend_enum")
)
# Keywords of ``patch.multiple`` that name no attribute.
_MULTIPLE: Final = frozenset({"spec", "create", "spec_set", "autospec", "new_callable"})
MARKS: Final[dict[str, Way]] = {"wrap": "wrap", "replace": "replace", "add": "add"}
_OURS: Final = "VLLMPatch"
# Parameters by which a replacement gets the original.
_ORIGINALS: Final = frozenset({"call", "wrapped"})
_COPIERS: Final = frozenset({"functools.wraps", "functools.update_wrapper"})
# The names of the first parameter in the libraries that patch.
_TARGETS: Final = ("target", "module", "dic", "destination")


def record_assignment(
    state: WalkState, target: ast.expr, expr: ast.expr | None, value: Values, *, way: Way | None = None
) -> bool:
    """Record an assignment to an attribute or entry; False if that is not vLLM's."""
    if isinstance(target, ast.Attribute):
        state.found.stored.add(target.attr)
        remember_original(state, target.attr, value)
        names = attributes(state.value(target.value), [target.attr])
        names = names or state.copies.get((dotted(target.value), target.attr), ())
    elif isinstance(target, ast.Subscript):
        keys = list(texts_in(state.value(target.slice)))
        for key in keys:
            remember_original(state, key, value)
        names = entries_of(state.value(target.value), keys)
    else:
        return False
    return state.assign(names, target.lineno, expr, way=way, value=value)


def attributes(owner: Values, names: list[str]) -> Values:
    """Return vLLM's attributes that are meant, a function's code being the function."""
    return tuple(
        one if attribute in _PARTS else one.inside(attribute) for one in vllm_names(owner) for attribute in names
    )


def remember_original(state: WalkState, key: str, value: Values) -> None:
    """Record that something from vLLM is also stored under another name from now on."""
    for one in vllm_names(value):
        state.found.saved.setdefault(key, set()).add(state.normal(one))


def patching_functions(
    state: WalkState, node: ast.Call, called: Values
) -> Iterator[tuple[LocalDef, dict[str, Values]]]:
    """Yield the package's functions that change an argument that is vLLM's, each with the values of its parameters.

    An example is ``def put(cls, value): cls.name = value``. ``called`` is the value of the expression that is called.
    """
    for own in local_defs(called):
        given = arguments(state, node, own) if isinstance(own.node, Function) else {}
        upstream = {name for name, value in given.items() if any(vllm_names(value))}
        if not upstream:
            continue
        # The names whose attributes the function sets or deletes.
        changed: set[str] = set()
        for one in nodes(own.node):
            if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load):
                changed.add(dotted(one.value).partition(".")[0])
            elif isinstance(one, ast.Call) and one.args and _last(one.func) in ("setattr", "delattr"):
                changed.add(dotted(one.args[0]).partition(".")[0])
        if not upstream.isdisjoint(changed):
            yield own, given


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
        if not (isinstance(one, ast.Compare) and len(one.ops) == 1 and isinstance(one.ops[0], (ast.Is, ast.Eq))):
            continue
        for place, other in ((one.left, one.comparators[0]), (one.comparators[0], one.left)):
            match place:
                case ast.Attribute(value=owner, attr=name):
                    pass
                case ast.Call(args=[owner, ast.Constant(value=str(name)), *_]) if dotted(place.func) == "getattr":
                    pass
                case _:
                    continue
            # ``request.status == RequestStatus.WAITING`` compares a value; a copy has the name of its original.
            copied = tuple(each for each in vllm_names(state.value(other)) if each.qualname.rpartition(".")[2] == name)
            if copied:
                found[dotted(owner), name] = copied
    return found


def record_call(
    state: WalkState, node: ast.Call, value: Values, own: LocalDef | None = None
) -> Sequence[ast.expr] | None:
    """Record a call that replaces names of vLLM, and return the arguments that are still to be walked.

    None if it is not such a call, or what it changes is not vLLM's. ``value`` is the value of the expression that is
    called, ``own`` the function that the call decorates.
    """
    called = dotted_of(value) or dotted(node.func)
    last = called.rpartition(".")[2]
    if last not in _CHANGING and not called.startswith(_MOCK):
        return None
    method = isinstance(node.func, ast.Attribute)
    first, second, line = _argument(node, 0, *_TARGETS), _argument(node, 1, "name"), node.lineno
    replacement = (own,) if own is not None else ()
    if called in _SETTERS or (last == "setattr" and method):
        done = _record_setattr(state, node)
    elif called in _DELETERS or (last == "delattr" and method):
        done = _record_setattr(state, node, way="delete")
    elif last in ("setitem", "delitem"):
        # pytest's ``setitem(sys.modules, name, value)``.
        entries = entries_of(state.value(first), list(texts_in(state.value(second))))
        way: Way | None = "delete" if last == "delitem" else None
        done = state.assign(entries, line, _argument(node, 2, "value"), way=way)
    elif last in _WRAPPERS:
        # ``wrap_function_wrapper(module, name, wrapper)``; a question mark defers it until the module's import.
        held = state.value(first)
        owners: Values = tuple(Name(text.rstrip("?")) for text in texts_in(held)) or held
        target = attributes(owners, list(texts_in(state.value(second))))
        done = state.assign(target, line, _argument(node, 2, "wrapper", "factory"), value=replacement, by="first")
    elif last == "extend_enum":
        # aenum's ``extend_enum(Class, name, value)`` adds a member.
        names = list(texts_in(state.value(second)))
        done = state.assign(attributes(state.value(first), names), line, _argument(node, 2), way="add")
    elif called.partition(".")[0] == "gorilla" and last in ("Patch", "patch"):
        # ``Patch(destination, name, obj)``, or ``@patch(destination)`` on a function of that name.
        names = list(texts_in(state.value(second)))
        if not names and own is not None and not isinstance(own.node, ast.Lambda):
            names = [own.node.name]
        expr = _argument(node, 2, "obj") if own is None else None
        done = state.assign(attributes(state.value(first), names), line, expr, value=replacement)
    else:
        done = _record_mock(state, node, called)
    if not done:
        return None
    return [one for one in (*node.args, *(keyword.value for keyword in node.keywords)) if one is not first]


def record_decorator(state: WalkState, decorator: ast.expr, own: LocalDef) -> bool:
    """Record a decorator that replaces a name of vLLM by the function it decorates; False if it does not."""
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


# Each of these returns False if the target is not vLLM's.


def _record_setattr(state: WalkState, node: ast.Call, *, way: Way | None = None) -> bool:
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
    return state.assign(target, node.lineno, None if way == "delete" else value, way=way)


def _record_mock(state: WalkState, node: ast.Call, called: str) -> bool:
    """Record mock's ``patch``, ``patch.object``, ``patch.multiple`` and ``patch.dict(sys.modules, {...})``."""
    base = next((one for one in _MOCK if called.startswith(one)), None)
    if base is None:
        return False
    form, line = called.removeprefix(base), node.lineno
    held = state.value(_argument(node, 0, "target"))
    spelled = list(texts_in(held))
    owners = _spelled(spelled, whole=True) or held
    if form == "":
        return state.assign(_spelled(spelled), line, _argument(node, 1, "new"))
    if form == ".object":
        names = list(texts_in(state.value(_argument(node, 1, "attribute"))))
        return state.assign(attributes(owners, names), line, _argument(node, 2, "new"))
    done: list[bool] = []
    if form == ".multiple":
        given = [(one.arg, one.value) for one in node.keywords if one.arg and one.arg not in _MULTIPLE]
        done = [state.assign(attributes(owners, [name]), line, value) for name, value in given]
    elif form == ".dict" and (Name("sys", "modules") in held or "sys.modules" in spelled):
        tables = [one for one in state.value(_argument(node, 1, "values")) if isinstance(one, MappingValue)]
        pairs = [(text, value) for table in tables for key, value in table.pairs for text in texts_in(key)]
        done = [state.assign((Name(text),), line, value=value) for text, value in pairs]
    return any(done)


def _spelled(paths: Sequence[str], *, whole: bool = False) -> tuple[Name, ...]:
    """Return names of vLLM spelled with dots alone; capitals distinguish classes from modules.

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
    """Return what a base such as ``VLLMPatch["module:Class"]`` patches; empty if that is not vLLM's."""
    if not isinstance(base, ast.Subscript) or not _last(base.value).endswith("Patch"):
        return ()
    held = state.value(base.slice)
    spelled = tuple(Name(module, qualname) for text in texts_in(held) for module, _, qualname in [text.partition(":")])
    return tuple(vllm_names((*held, *spelled)))


def record_patch_class(state: WalkState, node: ast.ClassDef, target: Values, members: list[ClassMember]) -> None:
    """Record every hook of a patch class."""
    said: PatchDeclaration | None = None
    for base in node.bases:
        # Another package may have a class of the name ``VLLMPatch``, too.
        if isinstance(base, ast.Subscript) and not any(local_defs(state.value(base.value))):
            named = state.dotted(base.value) or dotted(base.value)
            if named in (_OURS, f"builtins.{_OURS}") or named.startswith("vllm_graft."):
                said = _said(state, node)
    for member in members:
        if member.function is None:
            is_hook = not (member.name.startswith("__") and member.name.endswith("__"))
        else:
            function = member.function.node
            marks = [dotted(one) for one in function.decorator_list] if isinstance(function, Function) else []
            # A property's setter belongs to its getter.
            is_hook = member.name not in BOOKKEEPING and not any(one.startswith(f"{member.name}.") for one in marks)
        if not is_hook:
            continue
        way, releases = _mark(member)
        # A hook of several bodies has one for each range of releases.
        patch = replace(said, releases=releases, marked=way is not None) if said is not None else None
        before = len(state.found.assignments)
        expr = member.expr
        if isinstance(expr, ast.Call) and _last(expr.func) in MARKS and expr.args:
            # Of ``limit = replace(5)`` the 5.
            expr = expr.args[0]
        state.assign(attributes(target, [member.name]), member.line, expr, way=way, value=member.value, by="call")
        for assignment in state.found.assignments[before:]:
            assignment.patch = patch
            assignment.owner = patch.name if patch is not None else ".".join((*state.owner, node.name))
            assignment.guard = assignment.guard.and_also(member.guard)


def _said(state: WalkState, node: ast.ClassDef) -> PatchDeclaration:
    """Read the keywords of the class statement, and what ``min_vllm_version`` adds to them."""
    said = {keyword.arg or "": next(texts_in(state.value(keyword.value)), "") for keyword in node.keywords}
    vllm = said.get("vllm", "")
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and _last(one.func) == "min_vllm_version":
            least = "".join(f">={text}" for text in texts_in(state.value(one.args[0])))
            vllm = ",".join(filter(None, (vllm, least)))
    values = {keyword.arg: keyword.value for keyword in node.keywords}
    locked = getattr(values.get("locked"), "value", None) is True
    why, upstream, remove_when = (said.get(name, "") for name in ("why", "upstream", "remove_when"))
    declared = PatchDeclaration(said.get("name") or node.name, node.lineno, vllm, locked=locked)
    return replace(declared, why=why, upstream=upstream, remove_when=remove_when)


def _mark(member: ClassMember) -> tuple[Way | None, str]:
    """Return the way that a hook is marked with, and the releases that this body is for."""
    own = next(local_defs(member.value), None)
    given: list[ast.expr] = [member.expr] if isinstance(member.expr, ast.Call) else []
    if own is not None and isinstance(own.node, Function):
        given += own.node.decorator_list
    for one in given:
        way = MARKS.get(_last(one.func if isinstance(one, ast.Call) else one))
        if way is not None:
            keywords = one.keywords if isinstance(one, ast.Call) else []
            ranges = [getattr(each.value, "value", None) for each in keywords if each.arg == "vllm"]
            return way, next((text for text in ranges if isinstance(text, str)), "")
    return None, ""


def _last(node: ast.expr) -> str:
    return dotted(node).rpartition(".")[2]


def use_of(assignment: Assignment, found: FileUses, resolver: Resolver) -> Use:
    """Return the use that an assignment makes, once all functions have been walked."""
    owns = list(local_defs(assignment.value)) or list(local_defs(resolver.value(assignment.expr, assignment.scope)))
    for each in owns:
        each.complete()
    functions = [each for each in owns if each.function is not None]
    wraps = not assignment.way and (
        assignment.handed
        or (assignment.by == "first" and not functions)
        or (assignment.by == "call" and any("call" in each.defaults for each in functions))
        or any(_calls_original(each, assignment, found, resolver) for each in functions)
    )
    own = owns[0] if owns and assignment.way != "delete" else None
    # ``partial(f, x)`` and ``classmethod(f)`` take other arguments than ``f``; what the package's own calls return is
    # the function itself.
    made = assignment.expr.func if isinstance(assignment.expr, ast.Call) else None
    as_written = not assignment.by and (made is None or any(local_defs(resolver.value(made, assignment.scope))))
    return Use(
        way=assignment.way or ("wrap" if wraps else "replace"),
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
        as_written=as_written and len(owns) == 1,
    )


def source(own: LocalDef) -> str:
    """Return the text of a function or class, decorators included."""
    if isinstance(own.node, ast.Lambda):
        return ast.get_source_segment(own.file.text, own.node) or ""
    first = first_line(own.node)
    return own.file.cut(first, own.node.end_lineno or first)


def _calls_original(own: LocalDef, assignment: Assignment, found: FileUses, resolver: Resolver) -> bool:
    """Return whether a function visibly calls the original, or passes it on to something that may."""
    node, target, scope = own.function, assignment.target, own.inside or own.scope
    if node is None:
        return False
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    originals = _ORIGINALS.intersection(names)
    if assignment.by == "first" and names:
        decorators = node.decorator_list if isinstance(node, Function) else []
        bound = names[0] in ("self", "cls") and not any(dotted(one) == "staticmethod" for one in decorators)
        originals = originals.union(names[1:2] if bound else names[:1])

    def is_original(node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name) if name in originals:
                return True
            case ast.Attribute(attr=name) if target in found.saved.get(name, ()):
                return True
            case ast.Subscript(slice=ast.Constant(value=key)):
                return target in found.saved.get(str(key), ())
            case ast.Call(func=ast.Attribute(value=inner, attr="__get__")):
                return is_original(inner)
        # The original itself, or a method of it such as ``__func__``.
        held = [one.dotted for one in resolver.value(node, scope) if isinstance(one, Name)]
        return any(one == target.dotted or one.startswith(f"{target.dotted}.__") for one in held)

    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and one.attr == f"{ORIGINAL}{target.qualname.rpartition('.')[2]}":
            return True
        if isinstance(one, ast.Call) and resolver.dotted(one.func, scope) not in _COPIERS:
            given = [one.func, *one.args, *(keyword.value for keyword in one.keywords)]
            if any(map(is_original, given)):
                return True
    return False


class Locks:
    """The lock files of one package, each read once; ``broken`` has the errors of those that cannot be read."""

    def __init__(self) -> None:
        self.broken: list[ConfigError] = []
        self._read: dict[Path, Mapping[str, ReviewedHooks]] = {}

    def reviewed(self, file: SourceFile, patch: str, hook: str) -> dict[str, str]:
        """Return the fingerprint of a hook's upstream code in each reviewed release."""
        path = lock_of(file)
        if path not in self._read:
            try:
                self._read[path] = Lock.read(path).patches
            except ConfigError as error:
                self.broken.append(error)
                self._read[path] = {}
        seen = self._read[path].get(patch, {}).get(hook, {})
        return {release: str(fingerprint) for release, fingerprint in seen.items()}


def locks_of(files: Iterable[SourceFile]) -> list[Path]:
    """Return the lock files for the patches in several files; modules of a package share that of their folder."""
    packed = {file.path.parent if "." in file.module or file.is_package else file.path: file for file in files}
    return sorted(set(map(lock_of, packed.values())))


def lock_of(file: SourceFile) -> Path:
    """Return the lock file for the patches in a file, or the path where it would be."""
    folder = file.path.parent
    depth = len(file.module.split(".")) - (0 if file.is_package else 1)
    if not depth:
        return folder / f"{file.path.stem}.{NAME}"
    return next(
        (place / NAME for place in [folder, *folder.parents][:depth] if (place / NAME).is_file()), folder / NAME
    )
