"""The outline of a module for the audit: each name with its kind, signature and body, each class with its attributes.

Of a class it also keeps how its constructor comes about. A field is written like a parameter of a signature: ``name``,
``name=`` with a default, ``kw name`` by keyword only. Its type follows behind a colon if that is a configuration
class: ``model_config=:ModelConfig``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_graft.audit.model import Arguments
from vllm_graft.patching.functions import FunctionKind, kind_in_source
from vllm_graft.sources.fingerprint import Fingerprint, Function, signature
from vllm_graft.sources.modules import ScopeEntry, SourceModule
from vllm_graft.sources.scopes import dotted

# The digits of a body's fingerprint that are compared: 32 bits, because they make up most of the catalogue.
BODY: Final = 8
# Marks a method that a subclass has to define, and a class whose metaclass enforces that.
ABSTRACT: Final = "A"
# Marks a decorator or metaclass that may change the arguments that a definition shows.
OPAQUE: Final = "?"
# Marks a generator function, or an ``async def`` that is one.
GENERATOR: Final = "*"
# Marks an ``async def`` that ``asynccontextmanager`` turns into a plain function.
MANAGER: Final = "&"
# Marks a function that a decorator may turn into another kind: a coroutine into a plain one.
WRAPPED: Final = "~"
# Marks a class whose ``__init__`` is generated from its fields.
DATACLASS: Final = "d"
# Marks a pydantic dataclass that ignores unknown keywords.
LENIENT: Final = "l"
# Marks a class whose fields are passed by keyword only.
KEYWORDS: Final = "k"
# Marks ``support_torch_compile``, whose constructor also takes ``vllm_config`` and ``prefix``.
COMPILED: Final = "t"

# Decorators that leave the parameters as they are: Python's, torch's and vLLM's own.
_TRANSPARENT: Final = frozenset(
    {
        "abstractmethod", "asynccontextmanager", "cache", "cached", "classmethod", "contextmanager", "compile",
        "deprecate_args", "deprecate_kwargs", "deprecated", "disable", "dynamo_timed", "final", "ignore",
        "inference_mode", "instrument", "load_aware_call", "lru_cache", "no_grad", "override", "overload", "run_once",
        "setter", "getter", "deleter", "staticmethod", "time_and_log", "traced", "with_amdsmi_context",
        "with_cancellation", "with_nvml_context", "wraps", "with_thread_limit", "enable_fake_mode", "instrument_manual",
        "step_eplb_after", "eager_break_during_capture", "if_aiter_supported", "with_gpu_sync_check", "property",
        "cached_property", "field_validator", "model_validator", "default_pooling_type", "attn_type",
        "runtime_checkable", "total_ordering", "unique", "support_torch_compile", "ignore_torch_compile",
        "assume_constant_result", "allow_in_graph", "logtime", "fault_tolerant_wrapper",
    }
)  # fmt: skip

_DATACLASSES: Final = frozenset({"dataclass", "config"})
_FIELD_CALLS: Final = frozenset({"field", "Field"})
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_DEFINITION: Final = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OutlineEntry:
    """One name.

    kind:   what it is, or "import"
    first:  the signature; of a class its bases; of an import what it is bound to
    second: the body's fingerprint; of a class the attributes that its methods set
    marks:  the letters above; of a function ``ABSTRACT``, ``OPAQUE``, ``GENERATOR``, ``MANAGER`` and ``WRAPPED`` only
    fields: of a class: the fields that it annotates, in order
    """

    kind: str
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    marks: str = ""
    fields: tuple[str, ...] = ()


def entries(module: SourceModule, *, within: str = "vllm") -> Iterator[tuple[str, OutlineEntry]]:
    """Yield every name of a module and of its classes; names that other modules define as imports."""
    if stars := tuple(f"{origin}:*" for origin in module.stars if origin.partition(".")[0] == within):
        yield "*", OutlineEntry("import", stars)
    for name in module.scope:
        place = module.place(name)
        if place is not None:
            yield from _definitions(place)
            continue
        bound = tuple(f"{one.module}:{one.name}" for one in module.imports(name))
        if any(one == within or one.startswith((f"{within}.", f"{within}:")) for one in bound):
            yield name, OutlineEntry("import", bound)
        elif any(not one.startswith("__future__:") for one in bound):
            # "-" stands for every other package: which one does not matter.
            yield name, OutlineEntry("import", (f"-:{name}",))


def _definitions(place: ScopeEntry) -> Iterator[tuple[str, OutlineEntry]]:
    yield place.qualname, entry(place)
    for name in place.module.class_scope(place.cls) if place.cls is not None else ():
        inner = place.inside(name)
        if inner is not None:
            yield from _definitions(inner)


def entry(place: ScopeEntry) -> OutlineEntry:
    """Return the outline of one class, function or value."""
    cls = place.cls
    if cls is not None:
        marks = class_marks(cls, place.module, alone=len(place.nodes) == 1)
        # A base without a name, such as the result of a call, becomes "?".
        bases = tuple(base or "?" for base in place.bases)
        # A named tuple or struct shows by its bases, which may be in another module.
        listed = fields(cls) if DATACLASS in marks or bases else ()
        return OutlineEntry("class", bases, tuple(sorted(set(_set_on_self(cls)))), marks, listed)
    if place.kind == "value":
        return OutlineEntry("value")
    body = Fingerprint.of(place.nodes).body[:BODY]
    marks, node = function_marks(place.nodes), place.nodes[-1]
    made = kind_in_source(node) if isinstance(node, Function) else "plain"
    if made is None:
        marks += WRAPPED
    elif made in ("generator", "async generator"):
        marks += GENERATOR
    elif made == "plain" and isinstance(node, ast.AsyncFunctionDef):
        marks += MANAGER
    return OutlineEntry(place.kind, signature(place.nodes), (body,), marks)


def _set_on_self(cls: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that a class's methods set on their first parameter."""
    for method in cls.body:
        if not isinstance(method, Function) or not method.args.args:
            continue
        first = method.args.args[0].arg
        registers = {
            f"{first}.{name}" for name in ("register_buffer", "register_parameter", "register_module", "add_module")
        }
        for node in ast.walk(method):
            given: list[ast.expr] = []
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == first:
                yield node.attr
            elif isinstance(node, ast.Call) and (called := dotted(node.func)) in registers:
                # ``self.register_buffer("name", ...)`` of a torch module.
                given = node.args[:1]
            elif isinstance(node, ast.Call) and called == "setattr" and node.args and dotted(node.args[0]) == first:
                given = node.args[1:2]
            yield from (one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str))


def kind_of_function(definition: str, marks: str) -> FunctionKind | None:
    """Return the kind of a function by its marks and the first token of its signature; None if it is not certain."""
    if WRAPPED in marks:
        return None
    if definition == "AsyncFunctionDef" and MANAGER not in marks:
        return "async generator" if GENERATOR in marks else "coroutine"
    return "generator" if GENERATOR in marks else "plain"


def function_marks(nodes: Sequence[ast.AST]) -> str:
    """Return the marks of a function, a method or several alternatives of one."""
    functions = [node for node in nodes if isinstance(node, Function)]
    names = {_last(one) for node in functions for one in node.decorator_list}
    unknown = {name for name in names - _TRANSPARENT if not name.startswith("register")}
    opaque = len(functions) < len(nodes) or unknown
    return (ABSTRACT if names & {"abstractmethod", "abstractproperty"} else "") + (OPAQUE if opaque else "")


def class_marks(cls: ast.ClassDef, module: SourceModule, *, alone: bool = True) -> str:
    """Return the marks of a class statement; one that is not alone is one of several meanings of the name."""
    marks = "" if alone else OPAQUE
    for decorator in cls.decorator_list:
        last = _last(decorator)
        given = {one.arg: one.value for one in decorator.keywords} if isinstance(decorator, ast.Call) else {}
        if last == "support_torch_compile":
            marks += COMPILED
        elif last not in _DATACLASSES:
            marks += "" if last in _TRANSPARENT or last.startswith("register") else OPAQUE
        elif not _is_constant(given.get("init"), False):
            first = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).partition(".")[0]
            pydantic = any(one.module.partition(".")[0] == "pydantic" for one in module.imports(first))
            config = given.get("config")
            pairs: list[tuple[object, ast.expr]] = []
            if isinstance(config, ast.Call):
                pairs = [(one.arg, one.value) for one in config.keywords]
            elif isinstance(config, ast.Dict):
                keys = (key.value if isinstance(key, ast.Constant) else None for key in config.keys)
                pairs = list(zip(keys, config.values, strict=True))
            extras = (one.value for name, one in pairs if name == "extra" and isinstance(one, ast.Constant))
            extra = str(next(extras, ""))
            # vLLM's own ``config`` forbids unknown keywords; pydantic's dataclass ignores them by default.
            lenient = (pydantic and extra != "forbid") or (last == "config" and extra in ("allow", "ignore"))
            marks += DATACLASS + (LENIENT if lenient else "")
            marks += KEYWORDS if _is_constant(given.get("kw_only"), True) else ""
    for keyword in cls.keywords:
        if keyword.arg == "metaclass":
            marks += ABSTRACT if _last(keyword.value) == "ABCMeta" else OPAQUE
        elif keyword.arg == "kw_only" and _is_constant(keyword.value, True):
            marks += KEYWORDS
    return "".join(dict.fromkeys(marks))


def fields(cls: ast.ClassDef) -> tuple[str, ...]:
    """Return the annotations of a class body in order, as the parameters of a generated constructor."""
    found: list[str] = []
    keywords = False
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        last = dotted(_evaluated(node.annotation)).rpartition(".")[2]
        if last == "KW_ONLY":
            keywords = True
        elif last != "ClassVar":
            call = node.value if isinstance(node.value, ast.Call) and _last(node.value) in _FIELD_CALLS else None
            given = {one.arg: one.value for one in call.keywords} if call is not None else {}
            if _is_constant(given.get("init"), False):
                continue
            prefix = "kw " if keywords or _is_constant(given.get("kw_only"), True) else ""
            if call is None:
                has_default = node.value is not None
            else:
                # pydantic's ``Field(...)`` marks a field without a default.
                first = [*call.args[:1], given.get("default")]
                required = any(isinstance(one, ast.Constant) and one.value is ... for one in first)
                has_default = not required and bool(call.args or given.keys() & {"default", "default_factory"})
            config = next(iter(configs(node.annotation)), "")
            found.append(f"{prefix}{node.target.id}{'=' if has_default else ''}{':' if config else ''}{config}")
    return tuple(found)


def configs(annotation: ast.expr) -> list[str]:
    """Return the configuration class that an annotation names besides None; empty for several, or a list."""
    outer = _evaluated(annotation)
    if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.BitOr):
        found = [name for side in (outer.left, outer.right) for name in configs(side)]
        return found if len(found) == 1 else []
    if isinstance(outer, ast.Subscript):
        return configs(outer.slice) if dotted(outer.value).rpartition(".")[2] == "Optional" else []
    name = dotted(outer)
    return [name] if name.endswith("Config") else []


def _evaluated(annotation: ast.expr) -> ast.expr:
    """Return an annotation, parsed if it is a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return annotation
    return annotation


def mentions(text: str) -> Counter[str]:
    """Count each word of a text apart from its definitions: in code, strings and comments alike."""
    words = Counter(_WORD.findall(text))
    words.subtract(_DEFINITION.findall(text))
    return words


@dataclass(frozen=True, slots=True)
class CallSite:
    """One way in which a method is called; ``owner`` is the class, "module:Class", whose ``self`` it is called on."""

    arguments: Arguments
    owner: str = ""


def call_sites(tree: ast.AST, module: str) -> Iterator[tuple[str, CallSite]]:
    """Yield every method that a module calls, with its arguments.

    A call that unpacks a list or a mapping does not show what it passes and is left out, as is one on ``super()``,
    which an override does not get.
    """
    left: list[tuple[ast.AST, str, str]] = [(tree, "", "")]
    while left:
        node, cls, this = left.pop()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            arguments = Arguments.of(node)
            on_super = isinstance(owner, ast.Call) and dotted(owner.func) == "super"
            if not on_super and not arguments.unpacks and not arguments.unpacks_keywords:
                own = bool(this) and isinstance(owner, ast.Name) and owner.id == this
                yield node.func.attr, CallSite(arguments, f"{module}:{cls}" if own else "")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                left.append((child, f"{cls}.{child.name}".lstrip("."), ""))
            elif isinstance(child, Function) and isinstance(node, ast.ClassDef):
                static = any(dotted(one) == "staticmethod" for one in child.decorator_list)
                names = [*child.args.posonlyargs, *child.args.args]
                left.append((child, cls, names[0].arg if names and not static else ""))
            else:
                left.append((child, cls, this))


def methods(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the methods that the classes of a module define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (one.name for one in node.body if isinstance(one, Function))


def _last(node: ast.expr) -> str:
    return dotted(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
