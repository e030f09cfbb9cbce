"""D030: a logits processor with a method that is missing, does not take vLLM's arguments, or returns nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from vllm_graft.doctor import server
from vllm_graft.doctor.classes import is_abstract, listed, methods_of, takes
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import decorators, dotted, own_nodes

CODE = "D030"
TITLE = "A logits processor whose methods vLLM cannot call"

_TRANSPARENT: Final = frozenset({"no_grad", "inference_mode", "override", "final", "staticmethod", "classmethod"})
"""Decorators that leave a method's arguments and what it returns as they are."""

_PROPERTIES: Final = frozenset({"property", "cached_property"})

_AT_START: Final = ("__init__", "is_argmax_invariant")
"""The methods that vLLM calls while it makes its processors; all other methods are called with the first request."""


def check(env: Environment) -> Iterator[Finding]:
    """Compare each processor with the interface of the runner that would use it, as the installed vLLM defines it."""
    if env.vllm is None or server.generates(env) is False or server.speculative_method(env) is not None:
        return
    interface = server.V2_PROCESSOR if server.runner(env) == "V2" else server.V1_PROCESSOR
    lineage = env.classes.lineage(interface)
    if lineage is None:
        return
    required = {name: method for name, method in methods_of(lineage).items() if method is not None}
    for processor in server.processors(env):
        derives = env.classes.is_a(processor.target, interface)
        # D013 covers classes that do not derive from the interface; the V1 runner takes installed ones anyway.
        loose = derives == "no" and processor.is_installed and interface == server.V1_PROCESSOR
        own = env.classes.lineage(processor.target) if derives == "yes" or loose else None
        for level, what, fix in _faults(methods_of(own), required, derives == "yes") if own is not None else ():
            installed = ", because it is installed, whether or not a request uses it" if processor.is_installed else ""
            yield processor.finding(CODE, level or server.processor_level(env), what + installed, fix)


Methods = Mapping[str, Function | None]


def _faults(
    methods: Methods, interface: Mapping[str, Function], inherits: bool
) -> Iterator[tuple[Level | None, str, str]]:
    """Yield what is wrong with a processor's methods, with a level if it is not that of an engine that stops."""
    missing = []
    for name, method in interface.items():
        # A method that the class has may be abstract; one that it lacks may be inherited.
        required = (is_abstract(method) or name == "validate_params") and name != "__init__"
        if is_abstract(methods[name]) if name in methods else required and not inherits:
            missing.append(name)
    if missing:
        yield None, _lacks(missing, methods, inherits), f"define {listed(missing)}"
    for name, method in interface.items():
        mine = methods.get(name)
        if name in missing or mine is None or mine is method or not decorators(mine) <= _TRANSPARENT | _PROPERTIES:
            continue
        nodes = list(own_nodes(mine))
        if other := _other_kind(mine, method, nodes):
            yield None, f"{name} is {other}; {_then(name)} with a TypeError", f"write it as vLLM's {name} is"
            continue
        passed = [arg.arg for arg in (*method.args.posonlyargs, *method.args.args)][1:]
        # The interfaces annotate as torch.Tensor what vLLM goes on with: the logits.
        gives = isinstance(method.returns, ast.Attribute) and method.returns.attr == "Tensor"
        if not takes(mine, len(passed) - ("staticmethod" in decorators(mine))):
            names = ", ".join(passed)
            what = f"{name} cannot be called with ({names}), which is what vLLM passes; {_then(name)} with a TypeError"
            yield None, what, f"write def {name}({', '.join(['self', *passed])})"
        elif gives and not _returns(nodes):
            what = f"{name} returns nothing, but vLLM uses what it returns; {_then(name)}"
            yield None, what, "return the logits, even if they were changed in place"
        elif gives and (line := _empty_end(mine, nodes)):
            what = f"{name} returns nothing on some paths (line {line}), but vLLM uses what it returns; "
            yield "warning", f"{what}{_then(name)} that takes one", "return the logits on every path"


def _lacks(missing: Sequence[str], methods: Methods, inherits: bool) -> str:
    called = "; vLLM calls apply, never __call__" if "apply" in missing and "__call__" in methods else ""
    if inherits:
        lacks = f"it does not define {listed(missing)}, which vLLM's class leaves abstract{called}"
        return f"{lacks}; {_then('__init__')} with a TypeError"
    then = _then("__init__") if any(name in _AT_START for name in missing) else _then(missing[0])
    lacks = f"it does not derive from vLLM's LogitsProcessor and has no {listed(missing)}{called}"
    return f"{lacks}; {then} with an AttributeError"


def _then(name: str) -> str:
    if name == "validate_params":
        return "every request fails"
    return "the engine stops at its start" if name in _AT_START else "the engine dies with the first request"


def _other_kind(mine: Function, method: Function, nodes: Sequence[ast.AST]) -> str:
    """Say what a method is where vLLM calls a plain one of the interface, on an object or on its class."""
    if decorators(mine) & _PROPERTIES:
        return "a property, but vLLM calls it"
    if isinstance(mine, ast.AsyncFunctionDef):
        return "a coroutine function, but vLLM does not await it"
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return "a generator, but vLLM does not iterate over it"
    on_class = {"classmethod", "staticmethod"}
    if decorators(method) & on_class and not decorators(mine) & on_class:
        return "an instance method, but vLLM calls it on the class, for every request"
    return ""


def _is_empty(node: ast.AST) -> bool:
    """Return whether a node is a ``return`` of nothing."""
    return isinstance(node, ast.Return) and (
        node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
    )


def _returns(nodes: Sequence[ast.AST]) -> bool:
    """Return whether a method with these nodes returns a value somewhere, or never reaches its end."""
    values = [node for node in nodes if isinstance(node, ast.Return) and not _is_empty(node)]
    return bool(values) or any(isinstance(node, ast.Raise) for node in nodes)


def _empty_end(method: Function, nodes: Sequence[ast.AST]) -> int:
    """Return the line of a ``return`` without a value, or of a last statement that may be passed; 0 without one."""
    empty = [node.lineno for node in nodes if isinstance(node, ast.Return) and _is_empty(node)]
    return min(empty) if empty else method.body[-1].lineno if _runs_out(method.body) else 0


def _runs_out(body: Sequence[ast.stmt]) -> bool:
    """Return whether control may reach the end of a body; False also if reading cannot tell."""
    if not body:
        return True
    last = body[-1]
    if isinstance(last, ast.If):
        return _runs_out(last.body) or _runs_out(last.orelse)
    if isinstance(last, ast.With | ast.AsyncWith):
        return _runs_out(last.body)
    if isinstance(last, ast.For | ast.AsyncFor):
        return _runs_out(last.orelse)
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        # An own method or a plain function may raise by design; tensors' methods return.
        called = last.value.func
        return isinstance(called, ast.Attribute) and not dotted(called).startswith(("self.", "sys.", "os."))
    return isinstance(last, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Pass | ast.Delete)
