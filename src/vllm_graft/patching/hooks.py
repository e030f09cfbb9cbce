"""Read a patch's body: each attribute becomes a hook, and one that cannot work is refused with the reason.

A body may hold functions, classmethods, staticmethods, properties and plain values. A module target takes functions
(a ``staticmethod`` there means the function) and plain values.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Final, Literal, cast

from vllm_graft.errors import DeclarationError, nearest
from vllm_graft.patching.functions import (
    ORIGINAL,
    AnyCallable,
    AttributeForm,
    attribute_form,
    functions_in,
    names_mentioned,
    never_reads,
    originals_misused,
    parameter_at,
    strings_mentioned,
    uses_class_cell,
)
from vllm_graft.patching.target import Target
from vllm_graft.versions import check_range

HookKind = Literal["wrap", "replace", "add"]
DeclaredKind = Literal["wrap", "replace", "add", "auto"]

BOOKKEEPING = frozenset(
    {
        "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__classcell__",
        "__classdictcell__", "__conditional_annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__",
        "__orig_bases__", "__parameters__", "__qualname__", "__static_attributes__", "__type_params__", "__weakref__",
    }
)  # fmt: skip
"""Names that Python itself puts into a class body, in the releases 3.11 to 3.14."""

CLASS_METHODS: Final = frozenset({"__init_subclass__", "__class_getitem__"})
"""Functions that Python turns into class methods in a class body, and nowhere else."""

_OF_THE_TYPE: Final = frozenset(
    {"__class__", *(name for name, value in vars(type).items() if inspect.isdatadescriptor(value))}
) - {"__abstractmethods__"}
"""Attributes that a class has from its type: what is set there does not stand in the class, and cannot be removed.
``__abstractmethods__`` does stand in the class."""


@dataclass(frozen=True, slots=True)
class MarkedValue:
    """A value in a patch's body with the kind that its author marked it as; "auto" without a mark."""

    kind: DeclaredKind
    value: object
    vllm: str = ""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Several values of one name in a patch's body, each for other releases."""

    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Hook:
    """One attribute that a patch changes.

    kind:       "auto" if the loaded target decides between replace and add
    originals:  the names ``x`` of every ``_original_x`` in its functions
    vllm:       the releases that this body is for; empty for all of the patch's
    """

    attribute: str
    kind: DeclaredKind
    form: AttributeForm
    value: object
    originals: frozenset[str]
    vllm: str = ""


def call_position(form: AttributeForm, of_class: bool) -> int:
    """Return the position of the parameter ``call``: after self or cls if there is one, else first."""
    return 1 if of_class and form != "staticmethod" else 0


def read_body(body: dict[str, object], patch: type, target: Target, where: str) -> tuple[Hook, ...]:
    """Return the hooks of a patch's body, in the order they were written."""
    reader = _BodyReader(patch, target, where)
    hooks: list[Hook] = []
    for name, raw in body.items():
        # Python adds "__hash__ = None" to every class that defines __eq__ alone; the author did not write it.
        if name in BOOKKEEPING or (name == "__hash__" and raw is None):
            continue
        hooks += [reader.hook(name, each) for each in (raw.values if isinstance(raw, Alternatives) else (raw,))]
    reader.check_originals(hooks)
    return tuple(hooks)


class PatchNamespace(dict[str, object]):
    """The namespace of a patch's class statement as it runs: a second body of a name joins the first, by its range.

    Without ranges Python's own rule holds, and the later one counts.
    """

    def __setitem__(self, name: str, value: object) -> None:
        before = self.get(name)
        earlier = before.values if isinstance(before, Alternatives) else (before,)
        ranges = [_unmark(one).vllm for one in (*earlier, value)]
        if name in self and any(ranges):
            if not all(ranges):
                what = f"there are several bodies of {name!r}, but one of them has no range"
                fix = f'give each its releases, as in @replace(vllm=">=0.31"), or leave one body of {name!r}'
                raise DeclarationError(what, where=f"patch {self.get('__qualname__', '')}", fix=fix)
            value = Alternatives((*earlier, value))
        super().__setitem__(name, value)


def _unmark(raw: object) -> MarkedValue:
    """Return kind, bare value and range of an attribute, whether the mark or another decorator is outside."""
    if isinstance(raw, MarkedValue):
        return raw
    if isinstance(raw, classmethod | staticmethod):
        inner: object = raw.__func__
        if isinstance(inner, MarkedValue):
            return MarkedValue(inner.kind, type(raw)(cast(AnyCallable, inner.value)), inner.vllm)
    if isinstance(raw, property):
        parts: tuple[object, ...] = (raw.fget, raw.fset, raw.fdel)
        marks = [part for part in parts if isinstance(part, MarkedValue)]
        if marks:
            get, put, delete = (
                cast(AnyCallable, part.value if isinstance(part, MarkedValue) else part) for part in parts
            )
            return MarkedValue(marks[0].kind, property(get, put, delete, raw.__doc__), marks[0].vllm)
    return MarkedValue("auto", raw)


class _BodyReader:
    """Reads one body; its fields are the facts that every refusal names."""

    def __init__(self, patch: type, target: Target, where: str) -> None:
        self.target, self.where = target, where
        self.mangled = f"_{patch.__name__.lstrip('_')}__"

    def hook(self, name: str, raw: object) -> Hook:
        marked = _unmark(raw)
        value = marked.value
        if not self.target.is_class and isinstance(value, staticmethod):
            value = value.__func__
        if self.target.is_class and name in CLASS_METHODS and isinstance(value, FunctionType):
            value = classmethod(value)
        form, functions = attribute_form(value), functions_in(value)
        fits = bool(functions) and (form == "function" or self.target.is_class)
        if form == "value":
            fits = not callable(value) and not hasattr(type(value), "__get__")
        what = fix = ""
        if name == "__slots__":
            what, fix = "a patch cannot change __slots__", "keep extra state in a table of your own"
        elif self.target.is_class and name in _OF_THE_TYPE:
            what = f"a patch cannot change {name}, which Python keeps outside of the class's attributes"
            fix = "patch the methods that should behave differently"
        elif name.startswith(self.mangled) and not name.endswith("__"):
            written = name.removeprefix(self.mangled[:-2])
            what = f"Python renames {written!r} after the patch's class, so it would never meet upstream's"
            fix = f"write the full name: def _{self.target.short}{written}(...)"
        elif not fits:
            allowed = "functions, classmethods, staticmethods, properties" if self.target.is_class else "functions"
            what = f"{name!r} is a {type(value).__name__}, which cannot be put on {self.target}"
            fix = f"use {allowed} or plain values; a callable object goes into a function that calls it"
        if what:
            raise DeclarationError(what, where=self.where, fix=fix)
        for function in functions:
            self._check_function(name, function)
        mentioned = {found for function in functions for found in names_mentioned(function)}
        originals = frozenset(each.removeprefix(ORIGINAL) for each in mentioned if each.startswith(ORIGINAL))
        declared = self._decide_kind(name, marked.kind, form, functions, originals)
        return Hook(name, declared, form, value, originals, check_range(marked.vllm, self.where))

    def _check_function(self, name: str, function: FunctionType) -> None:
        private = sorted(n for n in names_mentioned(function) if n.startswith(self.mangled) and not n.endswith("__"))
        what = fix = ""
        if private:
            written = private[0].removeprefix(self.mangled[:-2])
            what = f"{name!r} uses {written!r}, which Python renames after the patch's class to {private[0]!r}"
            fix = f"write the full name: _{self.target.short}{written}"
        elif not self.target.is_class and uses_class_cell(function):
            what, fix = f"{name!r} uses super(), but the target is a module", "target the class instead"
        elif misused := originals_misused(function):
            what = f"{name!r} uses {misused!r} in another way than reading it as an attribute"
            fix = f"write self.{misused}(...), or take the layer beneath as a parameter named 'call'"
        if what:
            raise DeclarationError(what, where=self.where, fix=fix)

    def _decide_kind(
        self,
        name: str,
        kind: DeclaredKind,
        form: AttributeForm,
        functions: Collection[FunctionType],
        originals: Collection[str],
    ) -> DeclaredKind:
        """Return the kind of a hook; one without a mark that reaches the layer beneath is a wrap."""
        position = call_position(form, self.target.is_class)
        takes_call = any(parameter_at(function, position) == "call" for function in functions)
        unused = all(parameter_at(each, position) != "call" or never_reads(each, "call") for each in functions)
        what = fix = ""
        if originals and not self.target.is_class:
            lacks = "a function of a module has no self to find it on"
            what = f"{name!r} mentions {ORIGINAL}{min(originals)}, but {lacks}"
            fix = f"take the layer beneath as the first parameter: def {name}(call, ...)"
        elif kind == "wrap" and name not in originals and unused:
            what = f"{name!r} is marked @wrap but never reaches the layer beneath"
            way = "call its parameter" if takes_call else f"call self.{ORIGINAL}{name}(...), take a parameter named"
            fix = f"{way} 'call', or mark it @replace"
        elif kind in ("replace", "add") and name in originals:
            what, fix = f"{name!r} is marked @{kind} but mentions {ORIGINAL}{name}", "mark it @wrap"
        if what and not self.target.is_class and self.target.short[:1].isupper():
            # Of a class the layer beneath is the second parameter, after self.
            package = self.target.module.rpartition(".")[0]
            fix = f'write "{package}:{self.target.short}" if {self.target.short!r} is a class; else {fix}'
        if what:
            raise DeclarationError(what, where=self.where, fix=fix)
        return "wrap" if kind == "auto" and (takes_call or name in originals) else kind

    def check_originals(self, hooks: Collection[Hook]) -> None:
        """Refuse an ``_original_x`` that belongs to no hook of this patch with something beneath it."""
        with_original = {hook.attribute for hook in hooks if hook.kind != "add"}
        for hook in hooks:
            for name in sorted(hook.originals - with_original):
                what = f"{hook.attribute!r} mentions {ORIGINAL}{name}, but the patch does not wrap or replace {name!r}"
                fix = f"call self.{name}(...), or add a hook named {name!r}"
                raise DeclarationError(what + nearest(name, with_original), where=self.where, fix=fix)
            for function in functions_in(hook.value):
                spelled = strings_mentioned(function) & {ORIGINAL + name for name in with_original}
                if spelled:
                    what = f"{hook.attribute!r} holds {min(spelled)!r} as a string, which is not followed"
                    raise DeclarationError(what, where=self.where, fix=f"write self.{min(spelled)}")
