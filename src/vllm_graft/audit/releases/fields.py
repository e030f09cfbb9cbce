"""How a class is constructed and a function called, as far as decorators and annotations say.

A field is written like a parameter of a signature: ``name``, ``name=`` with a default, ``kw name`` by keyword only.
Behind a colon stands its type where that is a configuration class: ``model_config=:ModelConfig``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

if TYPE_CHECKING:
    from vllm_graft.sources.modules import SourceModule as ReadModule

ABSTRACT: Final = "A"
"""A method that a subclass has to define; a class whose metaclass sees to that."""

OPAQUE: Final = "?"
"""A decorator or a metaclass that may take other arguments than the definition shows."""

DATACLASS: Final = "d"
"""The class's fields make its ``__init__``."""

LENIENT: Final = "l"
"""A pydantic dataclass that ignores keywords it does not know."""

KEYWORDS: Final = "k"
"""Its fields are passed by keyword only."""

COMPILED: Final = "t"
"""``support_torch_compile``: the constructor also takes ``vllm_config`` and ``prefix``."""

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
"""Decorators that leave the parameters as they are: Python's, torch's and vLLM's own."""

_DATACLASSES: Final = frozenset({"dataclass", "config"})
_FIELD_CALLS: Final = frozenset({"field", "Field"})


def function_marks(nodes: Sequence[ast.AST]) -> str:
    """The marks of a function, a method or several alternatives of one."""
    functions = [node for node in nodes if isinstance(node, Function)]
    names = {_last(one) for node in functions for one in node.decorator_list}
    opaque = len(functions) < len(nodes) or any(not _is_transparent(name) for name in names)
    return (ABSTRACT if names & {"abstractmethod", "abstractproperty"} else "") + (OPAQUE if opaque else "")


def class_marks(cls: ast.ClassDef, module: ReadModule, *, alone: bool = True) -> str:
    """The marks of a class statement; one that is not alone is one of several things that the name may be."""
    marks = "" if alone else OPAQUE
    for one in cls.decorator_list:
        last = _last(one)
        if last in _DATACLASSES:
            marks += _dataclass(one, module)
        elif last == "support_torch_compile":
            marks += COMPILED
        elif not _is_transparent(last):
            marks += OPAQUE
    for keyword in cls.keywords:
        if keyword.arg == "metaclass":
            marks += ABSTRACT if _last(keyword.value) == "ABCMeta" else OPAQUE
        elif keyword.arg == "kw_only" and _is_true(keyword.value):
            marks += KEYWORDS
    return "".join(dict.fromkeys(marks))


def _dataclass(decorator: ast.expr, module: ReadModule) -> str:
    given = {one.arg: one.value for one in decorator.keywords} if isinstance(decorator, ast.Call) else {}
    if _is_false(given.get("init")):
        return ""
    first = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).partition(".")[0]
    origins = {one.module for one in module.imports(first)}
    # vLLM's own ``config`` forbids what it does not know; pydantic's dataclass ignores it unless told otherwise.
    lenient = any(origin.partition(".")[0] == "pydantic" for origin in origins) and not _forbids(given.get("config"))
    if not lenient and _last(decorator) == "config" and _allows(given.get("config")):
        lenient = True
    keywords = KEYWORDS if _is_true(given.get("kw_only")) else ""
    return DATACLASS + (LENIENT if lenient else "") + keywords


def fields(cls: ast.ClassDef) -> tuple[str, ...]:
    """What a class annotates in its body, in order, as the parameters that a generated constructor would have."""
    found: list[str] = []
    keywords = False
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        outer = _annotation(node.annotation)
        last = dotted(outer).rpartition(".")[2] if isinstance(outer, ast.expr) else ""
        if last == "KW_ONLY":
            keywords = True
        elif last != "ClassVar":
            given = _field_call(node.value)
            if not _is_false(given.get("init")):
                by_keyword = keywords or _is_true(given.get("kw_only"))
                default = "=" if node.value is not None and _has_default(node.value, given) else ""
                named = next(iter(configs(node.annotation)), "")
                found.append(f"{'kw ' if by_keyword else ''}{node.target.id}{default}{':' if named else ''}{named}")
    return tuple(found)


def configs(annotation: ast.expr) -> list[str]:
    """The configuration class that an annotation names besides None; nothing where there are several, or a list."""
    outer = _annotation(annotation)
    if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.BitOr):
        found = [name for side in (outer.left, outer.right) for name in configs(side)]
        return found if len(found) == 1 else []
    if isinstance(outer, ast.Subscript):
        return configs(outer.slice) if dotted(outer.value).rpartition(".")[2] == "Optional" else []
    name = dotted(outer)
    return [name] if name.endswith("Config") else []


def _annotation(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return node
    return node


def _field_call(value: ast.expr | None) -> dict[str | None, ast.expr]:
    if not isinstance(value, ast.Call) or dotted(value.func).rpartition(".")[2] not in _FIELD_CALLS:
        return {}
    return {one.arg: one.value for one in value.keywords}


def _has_default(value: ast.expr, given: dict[str | None, ast.expr]) -> bool:
    if not isinstance(value, ast.Call) or dotted(value.func).rpartition(".")[2] not in _FIELD_CALLS:
        return True
    if any(isinstance(one, ast.Constant) and one.value is ... for one in (*value.args[:1], given.get("default"))):
        return False
    return bool(value.args) or "default" in given or "default_factory" in given


def _forbids(config: ast.expr | None) -> bool:
    return _extra(config) == "forbid"


def _allows(config: ast.expr | None) -> bool:
    return _extra(config) in ("allow", "ignore")


def _extra(config: ast.expr | None) -> str:
    pairs: Iterator[tuple[str | None, ast.expr]] = iter(())
    if isinstance(config, ast.Call):
        pairs = ((one.arg, one.value) for one in config.keywords)
    elif isinstance(config, ast.Dict):
        pairs = (
            (key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None, value)
            for key, value in zip(config.keys, config.values, strict=True)
        )
    return next((str(one.value) for name, one in pairs if name == "extra" and isinstance(one, ast.Constant)), "")


def _is_transparent(name: str) -> bool:
    return name in _TRANSPARENT or name.startswith("register")


def _last(node: ast.expr) -> str:
    return dotted(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
