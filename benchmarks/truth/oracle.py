"""Decides a use by running vLLM: import the module, get the attribute, bind the call, build the class."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import os
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from truth.collect import Function, OwnClass, Package, Shape, Upstream, Use, is_upstream, shape_of
from truth.guards import Evaluator
from truth.upstream import Sources
from truth.verdicts import BROKEN, FINE, NO_USE, UNDECIDED, Broken, NoUse, Undecided

_HARMLESS = {"override", "inference_mode", "no_grad", "abstractmethod"}
_MISSING = object()
_Cached = type(functools.lru_cache(lambda: None))


class Oracle:
    """The installed vLLM."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm

        self.version = str(vllm.__version__)
        self.sources = Sources(Path(vllm.__file__).parent, self.version)
        self.evaluator = Evaluator(self)
        self._modules: dict[str, object] = {}
        self._files: tuple[Package, dict[str, bool | None]] | None = None

    def decide(self, use: Use, package: Package) -> None:
        """Write the verdict into a use."""
        runs = self.evaluator.runs(use.guards)
        if runs is False:
            use.verdict, use.why = FINE, "its branch does not run"
            return
        imported = self._imported(use, package)
        if imported is False:
            use.verdict, use.why = FINE, "its file is not imported"
            return
        runs = imported if imported is None else runs
        try:
            self._decide(use, package)
            use.verdict = FINE
        except NoUse as error:
            use.verdict, use.why = NO_USE, str(error)
        except Undecided as error:
            use.verdict, use.why = UNDECIDED, str(error)
        except Broken as error:
            if self.evaluator.survives(use.guards, error.error):
                use.verdict, use.why = FINE, f"provided for: {error}"
            elif runs is None:
                use.verdict, use.why = UNDECIDED, f"behind a condition: {error}"
            else:
                use.verdict, use.why = BROKEN, str(error)
        except Exception as error:
            # Anything may happen when unknown classes are taken apart; it is counted, and --undecided shows it.
            use.verdict, use.why = UNDECIDED, f"it could not be tried: {type(error).__name__}: {error}"

    def _imported(self, use: Use, package: Package) -> bool | None:
        """Tell whether the file of a use is imported on this release."""
        if self._files is None or self._files[0] is not package:
            runs = self.evaluator.modules_run(package)
            self._files = package, {module.shown: runs[module.name] for module in package.modules.values()}
        return self._files[1][use.file]

    def _decide(self, use: Use, package: Package) -> None:
        if use.kind == "import":
            try:
                self.get(use.refs[0])
            except Broken:
                if package.adds(use.refs[0].dotted):
                    raise Undecided("the package itself may put it there") from None
                raise
        elif use.kind == "read":
            self._read(use, package)
        elif use.kind == "call":
            self._call(use, package)
        elif use.kind == "field":
            self._field(use, package)
        else:
            _Member(self, use, package).decide()

    # Names

    def status(self, ref: Upstream) -> str:
        """Return how a name fares."""
        try:
            self.get(ref)
        except Broken:
            return BROKEN
        except Undecided:
            return UNDECIDED
        return FINE

    def live(self, refs: Iterable[Upstream]) -> object:
        """Return the object of the name that is in force on this release."""
        found: list[object] = []
        broken: Broken | None = None
        refs = tuple(refs)
        for ref in refs:
            if len(refs) > 1 and (runs := self.evaluator.runs(ref.guards)) is not True:
                if runs is None:
                    raise Undecided("which of several names is in force")
                continue
            try:
                found.append(self.get(ref))
            except Broken as error:
                broken = error
        if not found and broken is not None:
            raise broken
        if len({id(one) for one in found}) != 1:
            raise Undecided("which of several names is in force")
        return found[0]

    def get(self, ref: Upstream) -> object:
        """Return the object of a name."""
        found = self._module(ref.module)
        place = ref.module
        for name in ref.path:
            found = self._attribute(found, name, place)
            place = f"{place}.{name}"
        return found

    def _module(self, name: str) -> object:
        if name not in self._modules:
            try:
                self._modules[name] = importlib.import_module(name)
            except ModuleNotFoundError as error:
                gone = error.name or ""
                if is_upstream(gone) and (name == gone or name.startswith(f"{gone}.")) and not _is_compiled(name):
                    self._modules[name] = Broken("ModuleNotFoundError", f"no module {gone}")
                else:
                    self._modules[name] = Undecided(f"{name} cannot be imported here: {error}")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                self._modules[name] = Undecided(f"{name} cannot be imported here: {type(error).__name__}: {error}")
        found = self._modules[name]
        if isinstance(found, Broken | Undecided):
            raise found
        return found

    def _attribute(self, holder: object, name: str, place: str) -> object:
        try:
            return getattr(holder, name)
        except AttributeError:
            pass
        except Exception as error:
            raise Undecided(f"reading {place}.{name} fails here: {error}") from error
        if isinstance(holder, types.ModuleType):
            try:
                return self._module(f"{holder.__name__}.{name}")
            except Broken:
                if name in bound_names(holder):
                    raise Undecided(f"{place} has {name} on other machines") from None
                raise Broken("ImportError", f"{place} has no {name}") from None
        if isinstance(holder, type):
            if dynamic(holder):
                raise Undecided(f"{place} makes up attributes")
            raise Broken("AttributeError", f"class {place} has no {name}")
        if self.sources.mentions(name):
            raise Undecided(f"the object at {place} may be of another class elsewhere")
        raise Broken("AttributeError", f"{place} has no {name}")

    # Calls and reads

    def _prefix(self, use: Use) -> object:
        """Return what is at the name of a use; undecided where the import that it goes by is broken already."""
        for ref in use.refs:
            first = Upstream(ref.module, ref.path[:1], ref.guards)
            if self.status(first) == BROKEN and len(use.refs) == 1:
                raise NoUse("counted where it is imported")
        return self.live(use.refs)

    def _read(self, use: Use, package: Package) -> None:
        try:
            self._prefix(use)
        except Broken:
            if use.refs[0].path and any(name in package.stored for name in use.refs[0].path):
                raise Undecided("the package itself may put it there") from None
            raise

    def _call(self, use: Use, package: Package) -> None:
        assert use.shape is not None
        try:
            called = self._prefix(use)
        except Broken:
            if any(name in package.stored for name in use.refs[0].path):
                raise Undecided("the package itself may put it there") from None
            raise
        if use.refs[0].path and package.replaces(use.refs[0].path[-1]):
            raise Undecided("the package itself may replace it")
        if isinstance(called, type):
            use.kind = "construct"
            self._construct(called, use.shape, package)
        elif isinstance(called, types.FunctionType | types.MethodType | functools.partial | _Cached):
            bind(called, use.shape, bound=0)
        else:
            raise Undecided(f"a {type(called).__name__} is called")

    def _construct(self, cls: type, shape: Shape, package: Package) -> None:
        if any((one.__name__, name) in package.replaced for one in cls.__mro__ for name in ("__init__", "__new__")):
            raise Undecided("the package replaces its constructor")
        if issubclass(cls, enum.Enum) or type(cls).__call__ is not type.__call__:
            raise Undecided(f"metaclass {type(cls).__name__}")
        if inspect.isabstract(cls):
            raise Broken("TypeError", f"abstract: {', '.join(sorted(cls.__abstractmethods__))}")
        own = [getattr(cls, name) for name in ("__new__", "__init__") if _written(cls, name)]
        if not own:
            bind(cls, shape, bound=0)
        for one in own:
            bind(one, shape, bound=1)

    def _field(self, use: Use, package: Package) -> None:
        cls = self._prefix(use)
        for name in use.path:
            if not isinstance(cls, type):
                raise Undecided("a field of several types")
            if not is_upstream(cls.__module__):
                return
            if not self.has_attribute(cls, name):
                live = next((one for one in live_configurations() if type(one) is cls), None)
                if live is None or not hasattr(live, name):
                    if name in package.stored:
                        raise Undecided("the package may put it there")
                    if live is None and (dynamic(cls) or self.sources.stores(name)):
                        raise Undecided("it may be put there elsewhere")
                    raise Broken("AttributeError", f"{cls.__name__} has no {name}")
            cls = _type_of(cls, name)

    def has_attribute(self, cls: type, name: str) -> bool:
        """Tell whether objects of a class have an attribute, as far as its own sources show."""
        return inspect.getattr_static(cls, name, _MISSING) is not _MISSING or name in instance_names(cls)


class _Member:
    """A use that goes by ``self``, ``super()``, or the class around it."""

    def __init__(self, oracle: Oracle, use: Use, package: Package) -> None:
        assert use.cls is not None
        self.oracle, self.use, self.package = oracle, use, package
        self.own, self.bases = self._lineage(use.cls)

    def _lineage(self, cls: OwnClass, depth: int = 0) -> tuple[list[OwnClass], list[type]]:
        """Return the classes of the package that one derives from, nearest first, and the classes of vLLM above."""
        own: list[OwnClass] = [cls]
        bases: list[type] = []
        if depth > 8:
            raise Undecided("a deep hierarchy")
        for base, node in zip(self.package.bases(cls), cls.node.bases, strict=True):
            if base and all(isinstance(one, Upstream) for one in base):
                refs = [one for one in base if isinstance(one, Upstream)]
                if any(self.oracle.status(ref) == BROKEN for ref in refs) and len(refs) == 1:
                    raise NoUse("counted where its base is imported")
                found = self.oracle.live(refs)
                if not isinstance(found, type):
                    if not inspect.isfunction(found):
                        raise Undecided("a base is no class here")
                    raise Broken("TypeError", f"base {refs[0].dotted} is a {type(found).__name__}")
                bases.append(found)
            elif len(base) == 1 and isinstance(base[0], OwnClass):
                above, theirs = self._lineage(base[0], depth + 1)
                own += above
                bases += theirs
            else:
                bases.append(self._foreign(node, cls))
        return own, list(dict.fromkeys(bases))

    def _foreign(self, node: ast.expr, cls: OwnClass) -> type:
        """Return a base from outside, such as ``nn.Module``."""
        node = node.value if isinstance(node, ast.Subscript) else node
        text = ast.unparse(node)
        known = {
            "nn.Module": "torch.nn.Module",
            "torch.nn.Module": "torch.nn.Module",
            "ABC": "abc.ABC",
            "abc.ABC": "abc.ABC",
        }
        known |= {
            "object": "builtins.object",
            "Exception": "builtins.Exception",
            "str": "builtins.str",
            "dict": "builtins.dict",
        }
        if text in ("Generic", "Protocol", "typing.Generic"):
            return object
        if text not in known:
            raise Undecided(f"base {text} is not vLLM's")
        module, _, name = known[text].rpartition(".")
        return getattr(importlib.import_module(module), name)

    def decide(self) -> None:
        if not any(is_upstream(base.__module__) for base in self.bases):
            raise NoUse("no base of vLLM's")
        ways = {
            "abstract": self._abstract,
            "override": self._override,
            "super call": self._super_call,
            "self call": self._self_call,
            "self read": self._self_read,
        }
        ways[self.use.kind]()

    def _probe(self, own: Iterable[OwnClass] = ()) -> type:
        """Return a class with these bases, and with what classes of the package define."""
        body = {name: None for cls in own for name in cls.defined if name not in ("__slots__", "__init_subclass__")}
        kept = [base for base in self.bases if not any(base is not one and base in one.__mro__ for one in self.bases)]
        body |= {"__module__": __name__}
        try:
            return types.new_class("Probe", tuple(kept), {}, lambda names: names.update(body))
        except BaseException as error:
            raise Undecided(f"the class cannot be built here: {error}") from error

    def _abstract(self) -> None:
        cls = self.use.cls
        assert cls is not None
        marks = [node for one in self.own for node in ast.walk(one.node) if isinstance(node, ast.Name | ast.Attribute)]
        own = any((mark.id if isinstance(mark, ast.Name) else mark.attr) in ("abstractmethod", "ABC") for mark in marks)
        asked: set[str] = set()
        for base in self.bases:
            asked |= set(getattr(base, "__abstractmethods__", ()))
        if not asked:
            return
        left = asked & set(getattr(self._probe(self.own), "__abstractmethods__", ()))
        if not left:
            return
        if own or self.package.descendants(cls):
            raise Undecided("it is itself a base class")
        if all(_kind(one)[0] in ("staticmethod", "classmethod") for one in cls.methods.values()):
            raise Undecided("nobody makes objects of it")
        if any((cls.node.name, name) in self.package.borrowed for name in cls.methods):
            raise Undecided("its methods are put on other classes")
        raise Broken("TypeError", f"abstract methods are missing: {', '.join(sorted(left))}")

    def _upstream_member(self, name: str) -> tuple[object, type]:
        """Return what vLLM's classes have under a name, unbound."""
        if len(self.bases) == 1:
            cls = self.bases[0]
        else:
            cls = self._probe()
        return inspect.getattr_static(cls, name, _MISSING), cls

    def _override(self) -> None:
        name, function = self.use.member, self.use.function
        assert function is not None
        if name.startswith("__") and name.endswith("__"):
            raise Undecided("who calls it is not known")
        theirs, _ = self._upstream_member(name)
        if theirs is _MISSING:
            if name in {known for base in self.bases for known in instance_names(base)}:
                raise Undecided("an attribute upstream")
            raise NoUse("no such name upstream")
        kind, plain = _kind(function)
        if isinstance(theirs, property | functools.cached_property):
            if kind not in ("property", "unknown"):
                raise Broken("TypeError", "upstream has a property there")
            return
        if kind == "unknown":
            raise Undecided("its decorator may change its parameters")
        inner = theirs.__func__ if isinstance(theirs, staticmethod | classmethod) else theirs
        if not isinstance(inner, types.FunctionType):
            raise Undecided(f"a {type(inner).__name__} upstream")
        if kind == "property":
            raise Broken("TypeError", "upstream has a function there")
        upstream_bound = 0 if isinstance(theirs, staticmethod) else 1
        own_bound = 0 if kind == "staticmethod" else 1
        their_signature = inspect.signature(inner)
        their_parameters = list(their_signature.parameters.values())[upstream_bound:]
        if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in their_parameters):
            raise Undecided("upstream's takes anything")
        shapes = list(_shapes(their_parameters))
        accepted = [fits(plain, shape, own_bound) for shape in shapes]
        if all(accepted):
            return
        calls = [shape for shape in self.oracle.sources.calls(name) if not shape.star and not shape.double_star]
        meant = [shape for shape in calls if fits(their_signature, shape, upstream_bound)]
        refused = [shape for shape in meant if not fits(plain, shape, own_bound)]
        if not meant and not any(accepted):
            raise Undecided("vLLM does not call it in plain sight")
        if not refused:
            return
        if self.oracle.sources.definers(name) > 1 and len(refused) < len(meant) and not self._one_family(name):
            # Calls on ``self`` in the classes above go to the override whoever else has such a method.
            own = {shape for base in self.bases for shape in calls_on_self(base, name)}
            refused = [shape for shape in refused if shape in own]
            if not refused:
                raise Undecided("which class vLLM's calls go to")
        raise Broken(
            "TypeError", f"vLLM calls it with {refused[0].positional} and {refused[0].keywords}, it takes {plain}"
        )

    def _one_family(self, name: str) -> bool:
        """Tell whether all classes of vLLM with a method are among those that the class derives from."""
        family = {one for base in self.bases for one in base.__mro__ if name in one.__dict__}
        below = set(family)
        left = list(family)
        while left:
            for sub in type.__subclasses__(left.pop()):
                if sub not in below and is_upstream(sub.__module__):
                    below.add(sub)
                    left.append(sub)
        return self.oracle.sources.definers(name) <= sum(name in one.__dict__ for one in below)

    def _super_call(self) -> None:
        name, shape = self.use.member, self.use.shape
        assert shape is not None
        for cls in self.own[1:]:
            if name in cls.defined:
                raise NoUse("it goes to a class of the package")
        if self.package.descendants(self.use.cls):  # type: ignore[arg-type]
            mixed = any(len(one.node.bases) > 1 for one in self.package.descendants(self.use.cls))  # type: ignore[arg-type]
            if mixed:
                raise Undecided("a mixin may come between")
        theirs, cls = self._upstream_member(name)
        if theirs is _MISSING:
            if name in self.package.stored:
                raise Undecided("the package itself may put it there")
            raise Broken("AttributeError", f"upstream has no {name}")
        self._bind(theirs, shape, cls)

    def _self_call(self) -> None:
        shape = self.use.shape
        assert shape is not None
        theirs, cls = self._self_member()
        if theirs is not None:
            self._bind(theirs, shape, cls)

    def _self_read(self) -> None:
        self._self_member()

    def _self_member(self) -> tuple[object | None, type]:
        """Return what upstream's classes have under the name; None for what is only an attribute of objects."""
        name = self.use.member
        if any(name in cls.defined for cls in self.own):
            raise NoUse("the package's own")
        assert self.use.cls is not None
        for one in self.package.descendants(self.use.cls):
            if name in one.defined:
                raise NoUse("the package's own")
            if len(one.node.bases) > 1:
                self._mixin_lacks(one, name)
        theirs, cls = self._upstream_member(name)
        if theirs is not _MISSING:
            if self.package.replaces(name):
                raise Undecided("the package itself may replace it")
            return theirs, cls
        if any(name in instance_names(base) for base in self.bases):
            return None, cls
        if name.startswith("__") or name in self.package.stored or self.oracle.sources.stores(name):
            raise Undecided("it may be put there elsewhere")
        if any(dynamic(base) for base in self.bases):
            raise Undecided("its class makes up attributes")
        if any((cls.node.name, method) in self.package.borrowed for cls in self.own for method in cls.methods):
            raise Undecided("its methods are put on other classes")
        raise Broken("AttributeError", f"{', '.join(base.__name__ for base in self.bases)}: no {name}")

    def _mixin_lacks(self, cls: OwnClass, name: str) -> None:
        """Raise where a class that derives from this one, and from others, may have an attribute from those."""
        own, bases = self._lineage(cls)
        if any(name in one.defined for one in own):
            raise NoUse("the package's own")
        others = [base for base in bases if base not in self.bases]
        if any(hasattr(base, name) or name in instance_names(base) or dynamic(base) for base in others):
            raise Undecided("a mixin may have it")

    def _bind(self, theirs: object, shape: Shape, cls: type) -> None:
        if isinstance(theirs, staticmethod):
            bind(theirs.__func__, shape, bound=0)
        elif isinstance(theirs, classmethod):
            bind(theirs.__func__, shape, bound=1)
        elif isinstance(theirs, types.FunctionType):
            bind(theirs, shape, bound=1)
        elif self.use.member == "__init__" and not (shape.positional or shape.keywords):
            return
        else:
            raise Undecided(f"a {type(theirs).__name__} is called")


def _written(cls: type, name: str) -> bool:
    return isinstance(inspect.unwrap(getattr(cls, name)), types.FunctionType)


def _is_compiled(name: str) -> bool:
    return any(part.endswith("_C") or "_C_" in part for part in name.split(".")) or "third_party" in name


def bind(called: object, shape: Shape, bound: int) -> None:
    """Bind a call's arguments as Python would; Broken where that fails."""
    try:
        signature = inspect.signature(called)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise Undecided("it has no signature") from error
    if not fits(signature, shape, bound):
        given = [*("_" * shape.positional), *(f"{name}=" for name in shape.keywords)]
        raise Broken("TypeError", f"({', '.join(given)}) does not fit {signature}")


def fits(signature: inspect.Signature, shape: Shape, bound: int) -> bool:
    """Tell whether a call fits a signature, ``bound`` arguments being given already."""
    binding = signature.bind_partial if shape.star or shape.double_star else signature.bind
    try:
        binding(*[None] * (shape.positional + bound), **dict.fromkeys(shape.keywords))
    except TypeError:
        return False
    return True


def _shapes(parameters: list[inspect.Parameter]) -> Iterator[Shape]:
    """Yield calls that a signature allows: the fewest and the most arguments, by position and by name."""
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    for full in (False, True):
        chosen = [one for one in positional if full or one.default is one.empty]
        extra = tuple(one.name for one in named if full or one.default is one.empty)
        yield Shape(len(chosen), extra)
        only = sum(one.kind is one.POSITIONAL_ONLY for one in chosen)
        yield Shape(only, (*(one.name for one in chosen[only:]), *extra))


def _kind(function: Function) -> tuple[str, inspect.Signature]:
    """Return what a method of the package is, and its signature."""
    kind = "function"
    for decorator in function.decorator_list:
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if name in ("staticmethod", "classmethod"):
            kind = name
        elif name in ("property", "cached_property", "setter"):
            kind = "property"
        elif name not in _HARMLESS:
            kind = "unknown"
    return kind, signature_of(function.args)


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature that a definition has."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    parameters = []
    for place, one in enumerate(positional):
        kind = (
            inspect.Parameter.POSITIONAL_ONLY
            if place < len(arguments.posonlyargs)
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        default = inspect.Parameter.empty if place < without else None
        parameters.append(inspect.Parameter(one.arg, kind, default=default))
    if arguments.vararg is not None:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for one, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = inspect.Parameter.empty if given is None else None
        parameters.append(inspect.Parameter(one.arg, inspect.Parameter.KEYWORD_ONLY, default=default))
    if arguments.kwarg is not None:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


@functools.cache
def _class_tree(cls: type) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None


@functools.cache
def calls_on_self(cls: type, name: str) -> frozenset[Shape]:
    """Return how the methods of a class and of its bases call a method on their own object."""
    found: set[Shape] = set()
    for one in cls.__mro__:
        tree = _class_tree(one) if is_upstream(one.__module__) else None
        for node in ast.walk(tree) if tree is not None else ():
            called = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
            if called is not None and called.attr == name and getattr(called.value, "id", "") in ("self", "cls"):
                found.add(shape_of(node))
    return frozenset(found)


@functools.cache
def bound_names(module: types.ModuleType) -> frozenset[str]:
    """Return the names that a module's source binds anywhere: on another platform they are there."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


@functools.cache
def instance_names(cls: type) -> frozenset[str]:
    """Return the attributes that the methods of a class and of its bases store on objects, and its annotations."""
    found: set[str] = set()
    for one in cls.__mro__:
        found.update(getattr(one, "__annotations__", {}))
        if dataclasses.is_dataclass(one):
            found.update(field.name for field in dataclasses.fields(one))
        tree = _class_tree(one)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in (
                    "setattr",
                    "register_buffer",
                    "register_parameter",
                    "add_module",
                    "register_module",
                    "__setattr__",
                ):
                    found.update(
                        arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                    )
    return frozenset(found)


@functools.cache
def live_configurations() -> tuple[object, ...]:
    """Return vLLM's configuration of a small model, and the configurations in it."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_graft.launcher.models import tiny_model

    made = EngineArgs(model=str(tiny_model()), dtype="float32", enforce_eager=True).create_engine_config()
    return made, *vars(made).values()


@functools.cache
def dynamic(cls: type) -> bool:
    """Tell whether objects of a class may have attributes that its source does not name."""
    for one in cls.__mro__:
        if one.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing", "pydantic"):
            continue
        if "__getattr__" in one.__dict__ or "__getattribute__" in one.__dict__:
            return True
        if not is_upstream(one.__module__) and one.__module__.partition(".")[0] not in sys.stdlib_module_names:
            return True
        tree = _class_tree(one)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) > 1:
                if not isinstance(node.args[1], ast.Constant):
                    return True
            elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
                return True
    return False


def _type_of(cls: type, name: str) -> object:
    """Return the class of a field; None where it may be several."""
    for one in cls.__mro__:
        if name in getattr(one, "__annotations__", {}):
            try:
                hint = typing.get_type_hints(one)[name]
            except Exception:
                return None
            kinds = (
                [kind for kind in typing.get_args(hint) if kind is not type(None)]
                if typing.get_origin(hint) in (typing.Union, types.UnionType)
                else [hint]
            )
            return kinds[0] if len(kinds) == 1 else None
    return None
