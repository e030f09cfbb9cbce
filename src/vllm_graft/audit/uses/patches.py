"""Patch classes: ``VLLMPatch["module:Class"]``, and any base named ``...Patch`` with a name of vLLM in brackets."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING, Final

from vllm_graft.audit.model import Declared, Way
from vllm_graft.audit.uses.state import State
from vllm_graft.audit.uses.targets import attributes
from vllm_graft.audit.uses.values import Name, Values, names_of, owns_of, texts_of
from vllm_graft.patching.hooks import BOOKKEEPING
from vllm_graft.sources.fingerprint import Function
from vllm_graft.sources.scopes import dotted

if TYPE_CHECKING:
    from vllm_graft.audit.uses.classes import Member

_MARKS: Final[dict[str, Way]] = {"wrap": "wrap", "replace": "replace", "add": "add"}


_OURS: Final = "VLLMPatch"


def targets(state: State, base: ast.expr) -> Values:
    """What a base class patches; empty where it is no patch of something of vLLM's."""
    if not isinstance(base, ast.Subscript) or not _last(base.value).endswith("Patch"):
        return ()
    held = state.value(base.slice)
    spelled = tuple(Name(module, qualname) for text in texts_of(held) for module, _, qualname in [text.partition(":")])
    return tuple(names_of((*held, *spelled)))


def declare(state: State, node: ast.ClassDef, target: Values, members: list[Member]) -> None:
    """Note every hook of a patch class."""
    said = _said(state, node) if any(_is_ours(state, base) for base in node.bases) else None
    for member in members:
        if _is_hook(member):
            way, releases = _mark(member)
            # A hook of several bodies has one for each range of releases.
            patch = dataclasses.replace(said, releases=releases, marked=way is not None) if said is not None else None
            _hook(state, target, member, way, patch, said.name if said is not None else node.name)


def _is_ours(state: State, base: ast.expr) -> bool:
    """Whether a base is vllm-graft's ``VLLMPatch``, and none of a package that names its own so."""
    if not isinstance(base, ast.Subscript) or any(owns_of(state.value(base.value))):
        return False
    named = state.dotted(base.value) or dotted(base.value)
    return named in (_OURS, f"builtins.{_OURS}") or named.startswith("vllm_graft.")


def _hook(state: State, target: Values, member: Member, way: Way | None, patch: Declared | None, owner: str) -> None:
    before = len(state.found.puts)
    expr = _unmarked(member.expr)
    state.put(attributes(target, [member.name]), member.line, expr, way=way, value=member.value, by="call")
    for put in state.found.puts[before:]:
        put.patch = patch
        put.owner = owner if patch is not None else ".".join((*state.owner, owner))
        put.guard = put.guard.and_also(member.guard)


def _said(state: State, node: ast.ClassDef) -> Declared:
    """The keywords of the class statement, and what ``min_vllm_version`` adds to them."""
    said = {keyword.arg: next(texts_of(state.value(keyword.value)), "") for keyword in node.keywords}
    vllm = said.get("vllm", "")
    for one in node.decorator_list:
        if isinstance(one, ast.Call) and one.args and _last(one.func) == "min_vllm_version":
            vllm = _both(vllm, "".join(f">={text}" for text in texts_of(state.value(one.args[0]))))
    return Declared(
        name=said.get("name") or node.name,
        line=node.lineno,
        vllm=vllm,
        locked=any(
            one.arg == "locked" and isinstance(one.value, ast.Constant) and one.value.value is True
            for one in node.keywords
        ),
        why=said.get("why", ""),
        upstream=said.get("upstream", ""),
        remove_when=said.get("remove_when", ""),
    )


def _both(first: str, second: str) -> str:
    return ",".join(part for part in (first, second) if part)


def _is_hook(member: Member) -> bool:
    if member.function is None:
        return not (member.name.startswith("__") and member.name.endswith("__"))
    node = member.function.node
    parts = node.decorator_list if isinstance(node, Function) else []
    # A property's setter belongs to its getter.
    return member.name not in BOOKKEEPING and not any(dotted(one).startswith(f"{member.name}.") for one in parts)


def _mark(member: Member) -> tuple[Way | None, str]:
    """The way that a hook's author asked for, and the releases that this body is for."""
    own = next(owns_of(member.value), None)
    given: list[ast.expr] = [member.expr] if member.expr is not None else []
    if own is not None and isinstance(own.node, Function):
        given += own.node.decorator_list
    for one in given:
        way = _MARKS.get(_last(one.func if isinstance(one, ast.Call) else one))
        if way is not None and not (one is member.expr and not isinstance(one, ast.Call)):
            return way, _releases(one)
    return None, ""


def _releases(mark: ast.expr) -> str:
    keywords = mark.keywords if isinstance(mark, ast.Call) else []
    held = [one.value for one in keywords if one.arg == "vllm"]
    return next((one.value for one in held if isinstance(one, ast.Constant) and isinstance(one.value, str)), "")


def _unmarked(expr: ast.expr | None) -> ast.expr | None:
    """Of ``limit = replace(5)`` the 5."""
    if isinstance(expr, ast.Call) and _last(expr.func) in _MARKS and expr.args:
        return expr.args[0]
    return expr


def _last(node: ast.expr) -> str:
    return dotted(node).rpartition(".")[2]
