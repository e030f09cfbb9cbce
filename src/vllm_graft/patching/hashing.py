"""A short name for a set of patches, equal in every process and run: part of the key of compiled code.

Compiled artefacts are cached under a key that knows nothing of patches, so that without this a run would load what
an unpatched one compiled. The hash covers names, targets and the code of the hooks, not of what the hooks call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from vllm_graft.patching.declare import Patch, declared
from vllm_graft.patching.functions import closure_values, functions_in

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis))


def patchset_hash(patches: Iterable[Patch]) -> str:
    """16 hexadecimal digits for these patches in this order; the order decides which layer runs first."""
    digest = hashlib.blake2b(digest_size=8)
    for patch in patches:
        for part in _patch(declared(patch)):
            digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _patch(patch: Patch) -> Iterator[str]:
    declaration = patch.declaration
    yield f"patch {declaration.name} {declaration.target}"
    for hook in declaration.hooks:
        yield f"hook {hook.attribute} {hook.kind} {hook.form}"
        functions = functions_in(hook.value)
        for function in functions:
            yield from _function(function, set())
        if not functions:
            yield _constant(hook.value)


def _function(function: FunctionType, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    yield from _code(function.__code__)
    yield _constant(function.__defaults__)
    yield _constant(function.__kwdefaults__)
    for value in closure_values(function):
        if isinstance(value, FunctionType):
            yield from _function(value, seen)
        else:
            yield _constant(value)


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_name} {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}"
    yield code.co_code.hex()
    yield f"{code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        else:
            yield _constant(constant)


def _constant(value: object) -> str:
    """A text for a value without addresses or an order that differs between processes."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} {[_constant(one) for one in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(_constant(one) for one in value)}"
    if isinstance(value, dict):
        return f"dict {[(_constant(key), _constant(one)) for key, one in value.items()]}"
    named = value if isinstance(value, type) else type(value)
    return f"{named.__module__}.{named.__qualname__}"
