"""What the classes of a release are like from outside: the order of their bases, constructors and abstract methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from vllm_graft.audit.releases.fields import ABSTRACT, COMPILED, DATACLASS, KEYWORDS, LENIENT, OPAQUE
from vllm_graft.audit.releases.outline import Entry
from vllm_graft.audit.releases.shape import Shape
from vllm_graft.sources.walk import ModuleNames as Module
from vllm_graft.sources.walk import NamedDefinition as Item
from vllm_graft.sources.walk import Walk

Signature = tuple[str, ...]
"""Parameters as ``upstream.fingerprint.signature`` writes them, without what the definition is."""

_PLAIN: Final = frozenset({"ABC", "Generic", "Protocol", "object"})
"""Bases from outside vLLM that have no constructor."""

_DEMANDING: Final = frozenset({"ABC", "Protocol"})
"""Bases whose metaclass makes no object while a method is abstract."""

_CHECKED: Final = frozenset({"BaseModel", "RootModel", "BaseSettings", "TypedDict"})
"""Bases whose constructors take what is not among the fields, or say elsewhere that they do not."""

_ALSO: Final = ("kw vllm_config=", "kw prefix=")
"""What the constructor of a class takes that ``support_torch_compile`` decorates."""

ItemT = TypeVar("ItemT", bound=Item)
ModuleT = TypeVar("ModuleT", bound=Module)


class Classes(Generic[ModuleT, ItemT]):
    """The classes of one release: ``entry`` is what is known of a name, ``names`` are those of a class's body."""

    def __init__(
        self,
        walk: Walk[ModuleT, ItemT],
        entry: Callable[[ItemT], Entry],
        inside: Callable[[ItemT, str], ItemT | None],
        names: Callable[[ItemT], Iterable[str]],
    ) -> None:
        self._walk = walk
        self._entry = entry
        self._inside = inside
        self._names = names
        self._orders: dict[tuple[str, str], list[ItemT | str]] = {}

    def order(self, item: ItemT) -> list[ItemT | str]:
        """The class and its bases as Python looks through them; a base from outside vLLM as the text that names it."""
        key = self._walk.home(item).name, item.qualname
        if key not in self._orders:
            self._orders[key] = _merge(item, self._bases, ())
        return self._orders[key]

    def _bases(self, item: ItemT) -> list[ItemT | str]:
        """The bases of a class; one that a value stands for, such as what a function gave back, is not known."""
        above = self._walk.bases(item)
        return [one if isinstance(one, str) or self._entry(one).kind == "class" else one.qualname for one in above]

    def name(self, item: ItemT) -> str:
        """A class as "module:Class"."""
        return f"{self._walk.home(item).name}:{item.qualname}"

    def outside(self, item: ItemT) -> frozenset[str]:
        """The bases from outside vLLM, and ``__getattr__`` where the class answers for any name."""
        order = self.order(item)
        found = {_last(one) for one in order if isinstance(one, str)} - _PLAIN
        for one in order:
            if not isinstance(one, str) and self._inside(one, "__getattr__") is not None:
                found.add("__getattr__")
        return frozenset(found)

    def constructor(self, item: ItemT) -> tuple[Signature, ...] | None:
        """The signatures that a construction has to fit, all of them, without ``self``; None where they are unknown."""
        found: list[Signature] = []
        order = self.order(item)
        compiled = any(COMPILED in self._entry(one).marks for one in order if not isinstance(one, str))
        for one in order:
            if isinstance(one, str):
                if _last(one) not in _PLAIN:
                    return None
                continue
            if OPAQUE in self._entry(one).marks:
                return None
            maker = self._inside(one, "__new__")
            made = self._parameters(maker) if maker is not None else ()
            own = self._initializer(one, order)
            if made is None or own is None:
                return None
            found += made
            if own:
                return (*found, *(_with(signature, _ALSO if compiled else ()) for signature in own))
        # ``object`` takes no arguments; what a protocol puts in its place takes any.
        return tuple(found) or (
            None if any(_last(one) == "Protocol" for one in order if isinstance(one, str)) else ((),)
        )

    def _initializer(self, cls: ItemT, order: Sequence[ItemT | str]) -> Sequence[Signature] | None:
        """The ``__init__`` of the class itself, written or made of fields: none, one, or None where it is unknown."""
        own = self._inside(cls, "__init__")
        if own is not None:
            return self._parameters(own)
        outside = {_last(one) for one in order if isinstance(one, str)}
        entry = self._entry(cls)
        if "NamedTuple" in map(_last, cls.bases):
            return [tuple(_bare(field) for field in entry.fields)]
        if outside & _CHECKED:
            return None
        if "Struct" in outside or DATACLASS in entry.marks:
            return [self._from_fields(order, struct="Struct" in outside)]
        return ()

    def _from_fields(self, order: Sequence[ItemT | str], *, struct: bool) -> Signature:
        """The parameters that the fields of a class and of its bases make; a name stays where it first stood."""
        found: dict[str, str] = {}
        lenient = False
        for one in reversed(order):
            entry = None if isinstance(one, str) else self._entry(one)
            if entry is None or not (struct or DATACLASS in entry.marks):
                continue
            lenient = lenient or LENIENT in entry.marks
            for field in map(_bare, entry.fields):
                by_keyword = KEYWORDS in entry.marks and not field.startswith("kw ")
                found[field.removeprefix("kw ").removesuffix("=")] = f"kw {field}" if by_keyword else field
        ordered = sorted(found.values(), key=lambda field: field.startswith("kw "))
        return (*ordered, "**ignored") if lenient else tuple(ordered)

    def _parameters(self, item: ItemT) -> Sequence[Signature] | None:
        """What a method takes besides its first parameter; None where that cannot be known."""
        entry = self._entry(item)
        if OPAQUE in entry.marks or entry.kind in ("value", "class", "property"):
            return None
        found = alternatives(entry.first)
        return [found[0][1:]] if len(found) == 1 else None

    def abstract(self, item: ItemT) -> frozenset[str]:
        """The methods that a subclass has to define before an object of it can be made."""
        order = self.order(item)
        if not any(map(self._demands, order)):
            return frozenset()
        known = [one for one in order if not isinstance(one, str)]
        found: dict[str, bool] = {}
        for one in known:
            for name in self._names(one):
                inner = self._inside(one, name) if name not in found else None
                if inner is not None:
                    entry = self._entry(inner)
                    found[name] = ABSTRACT in entry.marks and entry.kind != "class"
        return frozenset(name for name, is_abstract in found.items() if is_abstract)

    def _demands(self, one: ItemT | str) -> bool:
        return _last(one) in _DEMANDING if isinstance(one, str) else ABSTRACT in self._entry(one).marks

    def config(self, item: ItemT, attribute: str) -> tuple[str, str] | None:
        """The configuration class that an attribute is annotated with: the module that says so, and its name there."""
        for one in self.order(item):
            for field in () if isinstance(one, str) else self._entry(one).fields:
                name, _, kind = field.removeprefix("kw ").partition(":")
                if name.removesuffix("=") == attribute and not isinstance(one, str):
                    return (self._walk.home(one).name, kind) if kind else None
        return None


class BaseRelease(ABC, Generic[ModuleT, ItemT]):
    """The questions about classes, which every release answers alike from the classes it knows."""

    def __init__(self, classes: Classes[ModuleT, ItemT]) -> None:
        self._classes = classes
        self._attributes: dict[tuple[str, str], frozenset[str] | None] = {}

    @abstractmethod
    def shape(self, module: str, qualname: str) -> Shape | None:
        """What a name looks like, or None where it is not there."""

    @abstractmethod
    def _collect(self, module: str, qualname: str) -> frozenset[str] | None:
        """The attributes of a class or module, found anew."""

    @abstractmethod
    def _class(self, module: str, qualname: str) -> ItemT | None:
        """The class of a name; None where it is something else, or nothing."""

    def attributes(self, module: str, qualname: str) -> frozenset[str] | None:
        """What a class and its bases define; of a module, where no class is named, its own names."""
        key = module, qualname
        if key not in self._attributes:
            self._attributes[key] = self._collect(module, qualname)
        return self._attributes[key]

    def constructor(self, module: str, qualname: str) -> tuple[Signature, ...] | None:
        """The signatures that a construction of a class has to fit; None where they are not known."""
        found = self._class(module, qualname)
        return self._classes.constructor(found) if found is not None else None

    def abstract(self, module: str, qualname: str) -> frozenset[str]:
        """The methods that a subclass of a class has to define."""
        found = self._class(module, qualname)
        return self._classes.abstract(found) if found is not None else frozenset()

    def outside(self, module: str, qualname: str) -> frozenset[str]:
        """What else answers for a class's attributes: bases from outside vLLM, and ``__getattr__``."""
        found = self._class(module, qualname)
        return self._classes.outside(found) if found is not None else frozenset()

    def config(self, module: str, qualname: str, attribute: str) -> Shape | None:
        """The configuration class that an attribute of a class is annotated with."""
        found = self._class(module, qualname)
        kind = self._classes.config(found, attribute) if found is not None else None
        return self.shape(kind[0], kind[1]) if kind is not None else None

    def lineage(self, module: str, qualname: str) -> list[str]:
        """A class and its bases in vLLM as Python looks through them, each as "module:Class"."""
        found = self._class(module, qualname)
        order = self._classes.order(found) if found is not None else []
        return [self._classes.name(one) for one in order if not isinstance(one, str)]


def alternatives(tokens: Sequence[str]) -> list[Signature]:
    """The parameters of each definition that a signature joins: one, or several where branches define the name."""
    found: list[list[str]] = []
    for token in tokens:
        if token in ("FunctionDef", "AsyncFunctionDef"):
            found.append([])
        elif found:
            found[-1].append(token)
    return [tuple(each) for each in found]


def _merge(item: ItemT, bases: Callable[[ItemT], list[ItemT | str]], below: tuple[ItemT, ...]) -> list[ItemT | str]:
    """Python's own order of bases; where the classes have none, each class before what is above it."""
    above = [one for one in bases(item) if one not in below]
    lines: list[list[ItemT | str]] = [
        [one] if isinstance(one, str) else _merge(one, bases, (*below, item)) for one in above
    ]
    lines = [line for line in [*lines, list(above)] if line]
    found: list[ItemT | str] = [item]
    while lines:
        later = [one for line in lines for one in line[1:]]
        head = next((line[0] for line in lines if line[0] not in later), lines[0][0])
        found.append(head)
        lines = [rest for line in lines if (rest := [one for one in line if one != head])]
    return found


def _with(signature: Signature, more: Iterable[str]) -> Signature:
    """A signature with keywords that it may have already, before a ``**`` at its end."""
    known = {token.removeprefix("kw ").removesuffix("=") for token in signature}
    new = [one for one in more if one.removeprefix("kw ").removesuffix("=") not in known]
    end = len(signature) - any(token.startswith("**") for token in signature)
    return (*signature[:end], *new, *signature[end:])


def _bare(field: str) -> str:
    return field.partition(":")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
