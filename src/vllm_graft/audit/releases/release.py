"""One release of vLLM and its answers: the definition of a name, the attributes of a class, the calls of a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_graft.audit.releases.outline import (
    ABSTRACT,
    COMPILED,
    DATACLASS,
    KEYWORDS,
    LENIENT,
    OPAQUE,
    CallSite,
    OutlineEntry,
    kind_of_function,
)
from vllm_graft.patching.functions import FunctionKind
from vllm_graft.sources.finder import Walk
from vllm_graft.sources.fingerprint import parse_parameter
from vllm_graft.sources.modules import DefinitionKind

# Other projects' code that vLLM carries; the catalogue leaves it out.
NOT_OURS: Final = "vllm.third_party"
# The kind of a name that a module of vLLM imports from elsewhere, such as ``torch`` or ``time``.
FOREIGN: Final = "name of another package"
# The kinds that can be called.
METHODS: Final = ("function", "classmethod", "staticmethod")

# Bases from outside vLLM that have no constructor.
_PLAIN: Final = frozenset({"ABC", "Generic", "Protocol", "object"})
# Bases whose metaclass refuses to instantiate a class with abstract methods.
_DEMANDING: Final = frozenset({"ABC", "Protocol"})
# Bases whose generated constructors may accept more than the annotated fields.
_CHECKED: Final = frozenset({"BaseModel", "RootModel", "BaseSettings", "TypedDict"})
# Keywords that ``support_torch_compile`` adds to a constructor.
_COMPILE_KEYWORDS: Final = ("kw vllm_config=", "kw prefix=")
Signature = tuple[str, ...]
"""Parameters as ``sources.fingerprint.signature`` writes them, without the kind of definition."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The definition of one name in one release.

    module, qualname:  where it is defined, which may be another place than the one looked up
    kind:              function, classmethod, staticmethod, property, class, value, module, or ``FOREIGN``
    signature:         the parts of its signature that callers depend on; see ``sources.fingerprint.signature``
    body:              the first digits of its body's fingerprint; empty for classes and modules
    inherited:         whether a base class defines it instead of the class looked up
    opaque:            whether a decorator may change the arguments it takes
    function:          of a function: whether it is plain, a coroutine or a generator; None if that is not certain
    """

    module: str
    qualname: str
    kind: DefinitionKind | str
    signature: Signature = ()
    body: str = ""
    inherited: bool = False
    opaque: bool = False
    function: FunctionKind | None = None

    @property
    def name(self) -> str:
        """Module and qualified name."""
        return f"{self.module}:{self.qualname}" if self.qualname else self.module


class Release(ABC):
    """One release of vLLM, whether it is read from the catalogue or from sources.

    Subclasses define how a module is found and what its definitions look like. An item is one definition, of the type
    that the subclass's walk returns; a base from outside vLLM is the text that names it.
    """

    version: str

    def __init__(self, walk: Walk[Any]) -> None:
        self._walk = walk
        self._shapes: dict[tuple[str, str], Shape | None] = {}
        self._attributes: dict[tuple[str, str], frozenset[str] | None] = {}
        self._orders: dict[tuple[str, str], list[Any]] = {}

    @abstractmethod
    def _module_names(self, module: str) -> Iterable[str] | None:
        """Return the names that a module binds, None if the release has no such module."""

    @abstractmethod
    def _entry(self, item: Any) -> OutlineEntry:
        """Return the outline of a definition."""

    @abstractmethod
    def _names(self, item: Any) -> Iterable[str]:
        """Return the names that the body of a class binds."""

    @abstractmethod
    def definers(self, method: str) -> Collection[str]:
        """Return every class that defines a method, as "module:Class"."""

    @abstractmethod
    def calls(self, method: str) -> Collection[CallSite]:
        """Return vLLM's own calls of a method that show what they pass; empty if they are not known."""

    @abstractmethod
    def elsewhere(self, name: str) -> Collection[Shape]:
        """Return every function or class of this name at the top level of a module."""

    @abstractmethod
    def unmentioned(self, names: Collection[str]) -> frozenset[str]:
        """Return the names that no code of the release mentions apart from their definitions."""

    def shape(self, module: str, qualname: str) -> Shape | None:
        """Return how a name is defined, None if it is missing; a module if ``qualname`` is empty."""
        key = module, qualname
        if key in self._shapes:
            return self._shapes[key]
        shape: Shape | None = None
        if not qualname:
            shape = Shape(module, "", "module") if self._module_names(module) is not None else None
        elif (found := self._walk.find(module, qualname)) is not None:
            shape = self._shape_of(*found)
        elif inner := self._walk.module_at(module, qualname):
            shape = Shape(inner, "", "module")
        elif self._walk.leads_out(module, qualname):
            shape = Shape(module, qualname, FOREIGN)
        self._shapes[key] = shape
        return shape

    def _shape_of(self, item: Any, inherited: bool = False) -> Shape:
        entry = self._entry(item)
        if entry.kind in ("class", "value"):
            return Shape(item.module.name, item.qualname, entry.kind, inherited=inherited)
        opaque = OPAQUE in entry.marks
        function = kind_of_function(entry.first[0], entry.marks) if entry.kind in METHODS and entry.first else None
        return Shape(
            item.module.name, item.qualname, entry.kind, entry.first, entry.second[0], inherited, opaque, function
        )

    def attributes(self, module: str, qualname: str) -> frozenset[str] | None:
        """Return the attributes of a class, those set on ``self`` included; without a class, a module's names."""
        key = module, qualname
        if key not in self._attributes:
            names = self._module_names(module) if not qualname else None
            if classes := self._order(module, qualname) if qualname else []:
                above = [item for item in self._walk.line(classes[0]) if self._entry(item).kind == "class"]
                names = (name for item in above for name in (*self._entry(item).second, *self._names(item)))
            self._attributes[key] = frozenset(names) if names is not None else None
        return self._attributes[key]

    def lineage(self, module: str, qualname: str) -> list[str]:
        """Return a class and its bases in vLLM in the order of Python's lookup, each as "module:Class"."""
        order = self._order(module, qualname)
        return [f"{item.module.name}:{item.qualname}" for item in order if not isinstance(item, str)]

    def outside(self, module: str, qualname: str) -> frozenset[str]:
        """Return what may provide attributes unseen: bases from outside vLLM, and ``__getattr__``."""
        order = self._order(module, qualname)
        found = {_last(one) for one in order if isinstance(one, str)} - _PLAIN
        if any(not isinstance(one, str) and one.inside("__getattr__") is not None for one in order):
            found.add("__getattr__")
        return frozenset(found)

    def abstract(self, module: str, qualname: str) -> frozenset[str]:
        """Return the methods that a subclass of a class has to define before it can be instantiated."""
        order = self._order(module, qualname)
        if not any(
            _last(one) in _DEMANDING if isinstance(one, str) else ABSTRACT in self._entry(one).marks for one in order
        ):
            return frozenset()
        found: dict[str, bool] = {}
        for one in order:
            for name in self._names(one) if not isinstance(one, str) else ():
                inner = one.inside(name) if name not in found else None
                if inner is not None:
                    entry = self._entry(inner)
                    found[name] = ABSTRACT in entry.marks and entry.kind != "class"
        return frozenset(name for name, is_abstract in found.items() if is_abstract)

    def config(self, module: str, qualname: str, attribute: str) -> Shape | None:
        """Return the configuration class that an attribute of a class is annotated with."""
        for one in self._order(module, qualname):
            for field in () if isinstance(one, str) else self._entry(one).fields:
                token, _, kind = field.partition(":")
                if parse_parameter(token).name == attribute:
                    return self.shape(one.module.name, kind) if kind else None
        return None

    def constructor(self, module: str, qualname: str) -> tuple[Signature, ...] | None:
        """Return the signatures that a construction has to fit, without ``self``; None if they are not known."""
        order = self._order(module, qualname)
        if not order:
            return None
        found: list[Signature] = []
        outside = {_last(one) for one in order if isinstance(one, str)}
        compiled = any(COMPILED in self._entry(one).marks for one in order if not isinstance(one, str))
        for one in order:
            if isinstance(one, str):
                if _last(one) not in _PLAIN:
                    return None
                continue
            entry, written = self._entry(one), one.inside("__init__")
            maker = one.inside("__new__")
            made = self._parameters(maker) if maker is not None else ()
            # The ``__init__`` of the class itself, written or generated.
            own: Sequence[Signature] | None = ()
            if written is not None:
                own = self._parameters(written)
            elif "NamedTuple" in map(_last, one.bases):
                own = [tuple(_untyped(field) for field in entry.fields)]
            elif outside & _CHECKED:
                own = None
            elif "Struct" in outside or DATACLASS in entry.marks:
                own = [self._generated(order, struct="Struct" in outside)]
            if OPAQUE in entry.marks or made is None or own is None:
                return None
            found += made
            for signature in own:
                # ``support_torch_compile`` adds keywords, unless the signature has them.
                known = {parse_parameter(token).name for token in signature}
                more = [one for one in _COMPILE_KEYWORDS if compiled and parse_parameter(one).name not in known]
                end = len(signature) - any(token.startswith("**") for token in signature)
                found.append((*signature[:end], *more, *signature[end:]))
            if own:
                return tuple(found)
        # ``object`` takes no arguments; the constructor that a protocol puts in its place takes any.
        return tuple(found) or (None if "Protocol" in outside else ((),))

    def _generated(self, order: Sequence[Any], *, struct: bool) -> Signature:
        """Return the parameters generated from the fields of a class and its bases; a name keeps its first place."""
        found: dict[str, str] = {}
        lenient = False
        for one in reversed(order):
            entry = None if isinstance(one, str) else self._entry(one)
            if entry is None or not (struct or DATACLASS in entry.marks):
                continue
            lenient = lenient or LENIENT in entry.marks
            for field in map(_untyped, entry.fields):
                by_keyword = KEYWORDS in entry.marks and not field.startswith("kw ")
                found[parse_parameter(field).name] = f"kw {field}" if by_keyword else field
        ordered = sorted(found.values(), key=lambda field: field.startswith("kw "))
        return (*ordered, "**ignored") if lenient else tuple(ordered)

    def _parameters(self, item: Any) -> Sequence[Signature] | None:
        """Return what a method takes after its first parameter; None if that cannot be known."""
        entry = self._entry(item)
        if OPAQUE in entry.marks or entry.kind in ("value", "class", "property"):
            return None
        found = alternatives(entry.first)
        return [found[0][1:]] if len(found) == 1 else None

    def _order(self, module: str, qualname: str) -> list[Any]:
        """Return a class and its bases in the order of Python's lookup; empty if the name is not a class."""
        key = module, qualname
        if key not in self._orders:
            found = self._walk.find(module, qualname)
            is_class = found is not None and self._entry(found[0]).kind == "class"
            self._orders[key] = self._linear(found[0], ()) if found is not None and is_class else []
        return self._orders[key]

    def _linear(self, item: Any, below: tuple[Any, ...]) -> list[Any]:
        """Return Python's C3 order; if the classes have none, each class stands before what is above it."""
        # A base may be a value, such as the result of a function: then only its name is known.
        bases = [
            one if isinstance(one, str) or self._entry(one).kind == "class" else one.qualname
            for one in self._walk.bases(item)
        ]
        above = [one for one in bases if one not in below]
        lines = [[one] if isinstance(one, str) else self._linear(one, (*below, item)) for one in above]
        lines = [line for line in [*lines, above] if line]
        found = [item]
        while lines:
            later = [one for line in lines for one in line[1:]]
            head = next((line[0] for line in lines if line[0] not in later), lines[0][0])
            found.append(head)
            lines = [rest for line in lines if (rest := [one for one in line if one != head])]
        return found


def alternatives(tokens: Sequence[str]) -> list[Signature]:
    """Return the parameters of each definition that a signature joins: several if branches define the name."""
    found: list[list[str]] = []
    for token in tokens:
        if token in ("FunctionDef", "AsyncFunctionDef"):
            found.append([])
        elif found:
            found[-1].append(token)
    return [tuple(each) for each in found]


def _untyped(field: str) -> str:
    return field.partition(":")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
