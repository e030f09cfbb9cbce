"""Resolve an expression to its values: through imports, aliases, attributes and the usual ways around them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from vllm_graft.audit.model import Condition, Outcome
from vllm_graft.audit.uses.syntax import returned_names
from vllm_graft.audit.uses.values import (
    TOP,
    Instance,
    LocalDef,
    MappingValue,
    Name,
    ParentMethods,
    PartialName,
    Receiver,
    Scope,
    SequenceValue,
    TextValue,
    Value,
    Values,
    local_defs,
    texts_in,
    union,
)
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import decorators, dotted

# Attributes of a function that still stand for the function.
_SAME: Final = frozenset({"__code__", "__func__", "__wrapped__", "__get__", "fget", "func"})

# Calls that return their first argument, wrapped in some way.
_PASSED_ON: Final = frozenset(
    {
        "builtins.classmethod", "builtins.staticmethod", "builtins.property", "functools.cache", "functools.lru_cache",
        "functools.cached_property", "functools.singledispatch", "functools.update_wrapper", "builtins.list",
        "builtins.tuple", "builtins.set",
        "builtins.sorted", "builtins.reversed", "builtins.iter", "inspect.unwrap",
        "contextlib.contextmanager",
    }
)  # fmt: skip

# Calls that return their first argument, with some of its arguments bound.
_APPLIED: Final = frozenset({"functools.partial", "functools.partialmethod", "types.MethodType"})
CONFIG: Final = Name("vllm.config", "VllmConfig")
# The beginnings of names that are a function's rather than a configuration's.
VERBS: Final = ("get_", "set_", "is_", "has_", "create_", "make_", "build_", "update_", "from_", "to_", "with_", "_")
_CONFIG_GETTERS: Final = frozenset({"get_current_vllm_config", "get_current_vllm_config_or_none"})

# Class methods of vLLM that return an instance of their class, in every release.
_MAKERS: Final = frozenset({"from_engine_args", "from_vllm_config", "from_cli_args", "from_optional"})
# Decorators that leave the result of a function as its annotation says.
_SAME_RESULT: Final = frozenset({"staticmethod", "classmethod", "cache", "lru_cache", "override", "final"})
# Assignments to attributes of ``self``: to one of them, and to several but for the last.
_SET: Final = re.compile(r"self\.(\w+)[ \t]*(?::[^=\n]*)?[-+*/|&]?=(?!=)[ \t]*(\w*)")
_SEVERAL: Final = re.compile(r"^[ \t]*((?:self\.\w+[ \t]*,[ \t]*)+)[\w., \t]*=(?!=)", re.MULTILINE)
_ATTRIBUTE: Final = re.compile(r"self\.(\w+)")

# The methods of a dictionary that give its items, by what they take of each pair.
_VIEWS: Final[Mapping[str, Callable[[tuple[Values, Values]], Values]]] = {
    "items": lambda pair: (SequenceValue(pair),),
    "keys": lambda pair: pair[0],
    "values": lambda pair: pair[1],
}
GETTERS: Final = frozenset({"builtins.getattr", "inspect.getattr_static", "gorilla.get_original_attribute"})
IMPORTERS: Final = frozenset({"importlib.import_module", "builtins.__import__"})


class PackageModules(Protocol):
    """The modules of the package that is read."""

    @property
    def tops(self) -> Collection[str]:
        """The first words of their names."""

    def is_module(self, name: str) -> bool:
        """Return whether a name is one of the modules, or of the packages above them."""

    def follow(self, name: Name) -> Values | None:
        """Return what a name in one of them stands for; None for names of other packages, and for modules."""

    def scope_of(self, module: str) -> Scope | None:
        """Return the names of one of them; None for modules that are not walked."""


class Resolver:
    """Resolves expressions in the scopes of one package."""

    def __init__(self, modules: PackageModules) -> None:
        self.modules = modules
        self.lambdas: dict[ast.expr, LocalDef] = {}
        """The nameless functions that have been walked."""
        self.outcomes: dict[Condition, Outcome] = {}
        """The outcomes of the tests that depend on no release."""
        self.own_names: frozenset[str] = frozenset()
        """The attributes that the package's classes define and its functions set, once all have been walked."""
        self.vague: dict[object, bool] = {}
        """The tests of which it is known whether they only ask objects that need not be vLLM's."""
        self._ways: dict[type[ast.expr], Callable[..., Values]] = {
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.Call: self._call,
            ast.Constant: lambda node, scope: (TextValue(node.value),) if isinstance(node.value, str) else (),
            ast.JoinedStr: self._joined,
            ast.BinOp: self._sum,
            ast.IfExp: lambda node, scope: union(self.value(node.body, scope), self.value(node.orelse, scope)),
            ast.BoolOp: self._either,
            ast.NamedExpr: lambda node, scope: self.value(node.value, scope),
            ast.Tuple: self._sequence,
            ast.List: self._sequence,
            ast.Set: self._sequence,
            ast.Dict: self._mapping,
            ast.Await: self._call,
            ast.Lambda: lambda node, scope: (self.lambdas[node],) if node in self.lambdas else (),
        }

    def is_foreign(self, name: Name) -> bool:
        """Return whether a name is neither vLLM's nor the package's own, and so nothing reached from it is."""
        top = name.module.partition(".")[0]
        return top != TOP and top not in self.modules.tops

    def value(self, node: ast.expr | None, scope: Scope) -> Values:
        """Return the alternatives that an expression stands for; empty if the source does not show them."""
        way = self._ways.get(type(node)) if node is not None else None
        return way(node, scope) if way is not None else ()

    def dotted(self, node: ast.expr, scope: Scope) -> str:
        """Return the full name of a function or class outside the package, such as "unittest.mock.patch"."""
        return dotted_of(self.value(node, scope))

    def attribute(self, value: Values, name: str) -> Values:
        """Return what an attribute of a value stands for."""
        return self._inside(value[0], name) if len(value) == 1 else union(*(self._inside(one, name) for one in value))

    def _inside(self, one: Value, name: str) -> Values:
        if isinstance(one, Name):
            return self._followed(one.inside(name))
        if isinstance(one, Instance):
            return (Instance(one.cls, (*one.path, name), one.guessed, one.declared),)
        if isinstance(one, Receiver):
            return self._stored_test(one.cls, name) or self._held_instance(one.cls, name)
        if not isinstance(one, LocalDef):
            return ()
        if one.function is not None:
            if name == "__name__" and isinstance(one.node, Function):
                return (TextValue(one.node.name),)
            return (one,) if name in _SAME else ()
        if name == "__dict__" and one.inside is not None:
            return (MappingValue(tuple(((TextValue(key),), held) for key, held in one.inside.names.items())),)
        found = one.inside.names.get(name) if one.inside is not None else None
        return found if found is not None else self.attribute(union(*one.bases), name)

    def _stored_test(self, cls: LocalDef, name: str, deep: int = 4) -> Values:
        """Return the outcome of a test that a method of a class or of its bases stores on its object."""
        if cls.inside is not None and name in cls.inside.tests:
            return cls.inside.tests[name]
        for own in cls.own_bases if deep else ():
            if found := self._stored_test(own, name, deep - 1):
                return found
        return ()

    def _held_instance(self, cls: LocalDef, name: str, deep: int = 4) -> Values:
        """Return the instance of a class of vLLM that an object of a class of the package holds in an attribute."""
        inside = cls.inside
        if inside is None:
            return ()
        if name in inside.instances:
            return inside.instances[name] if _assignments(cls)[name] < 2 else ()
        if name in inside.names:
            own = next((one for one in inside.names[name] if isinstance(one, LocalDef)), None)
            marks = own.node.decorator_list if own is not None and isinstance(own.node, Function) else []
            is_property = len(marks) == 1 and dotted(marks[0]).rpartition(".")[2] in ("property", "cached_property")
            return own.result if own is not None and is_property else ()
        for own in cls.own_bases if deep else ():
            if found := self._held_instance(own, name, deep - 1):
                return found if not _assignments(cls)[name] else ()
        return ()

    def _followed(self, one: Value) -> Values:
        """Return what a name of one of the package's own modules stands for there; others stand for themselves."""
        found = self.modules.follow(one) if isinstance(one, Name) else None
        return (one,) if found is None else found

    def _name(self, node: ast.Name, scope: Scope) -> Values:
        found = scope.find(node.id)
        if found is None:
            return scope.module().starred(node.id) or (Name("builtins", node.id),)
        if len(found) == 1:
            # Most names have one value, and they are most of all expressions.
            one = found[0]
            followed = self.modules.follow(one) if isinstance(one, Name) else None
            return found if followed is None else followed
        return union(*map(self._followed, found)) if found else guessed(node.id)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Values:
        return self.attribute(self.value(node.value, scope), node.attr) or guessed(node.attr)

    def annotated(self, node: ast.expr | None, scope: Scope) -> Values:
        """Return the instance of a class of vLLM that an annotation promises; empty for a choice of several."""
        found = tuple(dict.fromkeys(self._promised(node, scope))) if node is not None else ()
        return found if len(found) == 1 else ()

    def declared(self, node: ast.expr | None, scope: Scope) -> Values:
        """Return what an annotation promises, as an instance that may be of a subclass."""
        found = self.annotated(node, scope)
        return tuple(replace(one, declared=True) for one in found if isinstance(one, Instance))

    def _promised(self, node: ast.expr | None, scope: Scope) -> Iterator[Instance]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except (SyntaxError, ValueError, RecursionError):
                return
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield from self._promised(node.left, scope)
            yield from self._promised(node.right, scope)
        elif isinstance(node, ast.Subscript):
            outer = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if outer == "Optional":
                yield from self._promised(node.slice, scope)
            elif outer == "Annotated" and isinstance(node.slice, ast.Tuple):
                yield from self._promised(node.slice.elts[0], scope)
        elif isinstance(node, ast.Name | ast.Attribute):
            for one in self._named(node, scope):
                if isinstance(one, Name) and one.is_vllm and is_class(one.qualname):
                    yield Instance(one)

    def _named(self, node: ast.expr, scope: Scope) -> Values:
        if isinstance(node, ast.Attribute):
            return self.attribute(self._named(node.value, scope), node.attr)
        found = scope.annotated(node.id) if isinstance(node, ast.Name) else ()
        return self._followed(found[0]) if len(found) == 1 else union(*map(self._followed, found))

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Values:
        found: list[Values] = []
        keys = list(texts_in(self.value(node.slice, scope)))
        for one in self.value(node.value, scope):
            if isinstance(one, MappingValue):
                found += [held for key, held in one.pairs if any(text in keys for text in texts_in(key))]
            else:
                found.append(entries_of((one,), keys))
        return union(*found)

    def _call(self, node: ast.Call | ast.Await, scope: Scope) -> Values:
        """Resolve a call to what it returns: an instance, what it passes on, or the result that is annotated."""
        if isinstance(node, ast.Await):
            called = self.value(node.value.func, scope) if isinstance(node.value, ast.Call) else ()
            return union(*(self._own_result(own, awaited=True) for own in local_defs(called)))
        called = self.value(node.func, scope)
        found: list[Values] = []
        if not called and isinstance(node.func, ast.Attribute):
            receivers = [one for one in self.value(node.func.value, scope) if isinstance(one, Receiver)]
            methods = [self._inside(one.cls, node.func.attr) for one in receivers]
            results = [self._own_result(own, awaited=False) for value in methods for own in local_defs(value)]
            found += [tuple(one for one in result if isinstance(one, Instance)) for result in results]
        for one in called:
            if isinstance(one, Name):
                found.append(self._result(one.dotted, node, scope) or self._made(one))
            elif isinstance(one, LocalDef):
                found.append(self._own_result(one, awaited=False))
            elif isinstance(one, Instance) and one.path[-1:] == ("create_engine_config",):
                found.append((Instance(CONFIG),))
        if not called and isinstance(node.func, ast.Call) and len(node.args) == 1:
            # ``wraps(original)(function)`` and other decorators called by hand.
            found.append(tuple(local_defs(self.value(node.args[0], scope))))
        elif not called and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            tables = [one for one in self.value(node.func.value, scope) if isinstance(one, MappingValue)]
            view = _VIEWS[node.func.attr]
            found.append(tuple(SequenceValue(tuple(map(view, table.pairs))) for table in tables))
        return union(*found)

    def _made(self, called: Name) -> Values:
        """Return the instance that a class of vLLM creates, or the configuration that its functions return."""
        owner, _, last = called.qualname.rpartition(".")
        if not called.is_vllm or isinstance(called, PartialName):
            return ()
        if called.qualname in _CONFIG_GETTERS:
            return (Instance(CONFIG),)
        if last in _MAKERS and is_class(owner):
            return (Instance(called.owner),)
        return (Instance(called),) if is_class(called.qualname) else ()

    def _own_result(self, own: LocalDef, *, awaited: bool) -> Values:
        """Return what a function of the package returns: an inner function, or what its annotation says.

        A decorator may change the latter.
        """
        node = own.node
        if not isinstance(node, Function):
            return ()
        if own.inside is not None and not awaited:
            returned = (own.inside.names.get(name, ()) for name in returned_names(node))
            if inner := tuple(one for value in returned for one in local_defs(value)):
                return inner
        if not own.result or isinstance(node, ast.AsyncFunctionDef) != awaited:
            return ()
        return own.result if decorators(node) <= _SAME_RESULT else ()

    def _result(self, called: str, node: ast.Call, scope: Scope) -> Values:
        """Return what a call of a known function returns."""
        first = node.args[0] if node.args else None
        if called in IMPORTERS:
            return tuple(Name(module) for module in self.imported(called, node, scope))
        if called in GETTERS and len(node.args) > 1:
            value = self.value(first, scope)
            return union(*(self.attribute(value, text) for text in texts_in(self.value(node.args[1], scope))))
        if called == "builtins.vars":
            return self.attribute(self.value(first, scope), "__dict__")
        if called == "pkgutil.resolve_name":
            found = (text.partition(":") for text in texts_in(self.value(first, scope)))
            return tuple(Name(module, qualname) for module, _, qualname in found)
        if called == "sys.modules.get":
            return tuple(Name(text) for text in texts_in(self.value(first, scope)))
        if called == "typing.cast" and len(node.args) > 1:
            return self.declared(first, scope) or self.value(node.args[1], scope)
        if called == "builtins.super":
            # ``super(Base, self)`` looks above the class that it names.
            named = [one for one in self.value(first, scope) if isinstance(one, LocalDef)] if first is not None else []
            cls = scope.method()
            return tuple(map(ParentMethods, named or ([cls] if cls is not None and first is None else [])))
        if called == "builtins.zip":
            rows = zip(*(loop_items(self.value(one, scope)) for one in node.args), strict=False)
            return (SequenceValue(tuple((SequenceValue(row),) for row in rows)),)
        if called in _APPLIED:
            value = self.value(first, scope)
            return tuple(PartialName(one.module, one.qualname) if isinstance(one, Name) else one for one in value)
        return self.value(first, scope) if called in _PASSED_ON else ()

    def imported(self, called: str, node: ast.Call, scope: Scope) -> list[str]:
        """Return the modules that a call of ``import_module`` or ``__import__`` returns."""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        names = list(texts_in(self.value(node.args[0] if node.args else given.get("name"), scope)))
        if called == "builtins.__import__":
            whole = len(node.args) > 3 or "fromlist" in given
            return names if whole else [name.partition(".")[0] for name in names]
        package = list(texts_in(self.value(node.args[1] if len(node.args) > 1 else given.get("package"), scope)))
        return [f"{package[0]}{name}" if name.startswith(".") and package else name for name in names]

    def _joined(self, node: ast.JoinedStr, scope: Scope) -> Values:
        parts = [""]
        for one in node.values:
            held = one.value if isinstance(one, ast.FormattedValue) else one
            texts = list(texts_in(self.value(held, scope)))
            parts = [f"{before}{text}" for before in parts for text in texts]
        return tuple(TextValue(part) for part in parts)

    def _sum(self, node: ast.BinOp, scope: Scope) -> Values:
        if not isinstance(node.op, ast.Add):
            return ()
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        return tuple(TextValue(first + second) for first in texts_in(left) for second in texts_in(right))

    def _either(self, node: ast.BoolOp, scope: Scope) -> Values:
        found = [self.value(one, scope) for one in node.values]
        # ``name or default`` is the name if that is spelled out.
        spelled = bool(found[0]) and all(isinstance(one, TextValue) and one.text for one in found[0])
        return found[0] if isinstance(node.op, ast.Or) and spelled else union(*found)

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Values:
        return (SequenceValue(tuple(self.value(one, scope) for one in node.elts)),)

    def _mapping(self, node: ast.Dict, scope: Scope) -> Values:
        pairs = zip(node.keys, node.values, strict=True)
        return (MappingValue(tuple((self.value(key, scope), self.value(held, scope)) for key, held in pairs)),)


def dotted_of(value: Values) -> str:
    """Return the full name of what is not the package's own, the first if there are several; empty for none."""
    for one in value:
        if isinstance(one, Name):
            return one.dotted
    return ""


def guessed(name: str) -> tuple[Instance, ...]:
    """Guess a variable or attribute by vLLM's usual names if nothing else tells: ``model_config``."""
    if name == "vllm_config":
        return (Instance(CONFIG, (), guessed=True),)
    named = name.endswith("_config") and not name.startswith(VERBS)
    return (Instance(CONFIG, (name,), guessed=True),) if named else ()


def is_class(qualname: str) -> bool:
    """Return whether a name is written as vLLM writes names of classes."""
    last = qualname.rpartition(".")[2].lstrip("_")
    return last[:1].isupper() and not (last.isupper() and "_" in last)


def _assignments(cls: LocalDef) -> Counter[str]:
    """Count the statements of a class that set each attribute on ``self`` to anything but None, by its text."""
    inside = cls.inside
    if inside is None:
        return Counter()
    if inside.assigned is None:
        text = cls.file.cut(cls.node.lineno, cls.node.end_lineno or cls.node.lineno)
        inside.assigned = Counter(name for name, value in _SET.findall(text) if value != "None")
        inside.assigned.update(name for names in _SEVERAL.findall(text) for name in _ATTRIBUTE.findall(names))
    return inside.assigned


def entries_of(holders: Values, keys: Sequence[str]) -> Values:
    """Return what entries of ``sys.modules`` and of namespaces stand for; other holders have none."""
    found: list[Name] = []
    for holder in holders:
        if isinstance(holder, Name) and holder.dotted == "sys.modules":
            found += map(Name, keys)
        elif isinstance(holder, Name) and holder.dotted == "vllm.envs.environment_variables":
            # The module reads its variables from this table.
            found += map(holder.owner.inside, keys)
        elif isinstance(holder, Name) and holder.qualname.rpartition(".")[2] == "__dict__":
            found += map(holder.owner.inside, keys)
    return tuple(found)


def loop_items(value: Values) -> list[Values]:
    """Return the items that a loop over a value goes through, if the source spells them out."""
    found: list[Values] = []
    for one in value:
        if isinstance(one, SequenceValue):
            found += one.items
        elif isinstance(one, MappingValue):
            found += [key for key, _ in one.pairs]
    return found
