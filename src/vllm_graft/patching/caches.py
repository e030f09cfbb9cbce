"""Functions behind ``functools.cache`` and ``lru_cache``: hooks go beneath the cache, which starts empty again.

A cached function stays cached: callers that count on getting the same object twice, or on calls that cost nothing,
still do. The cache is a new one of the same size, because what the old one holds was computed without the patch; so
``cache_clear``, ``cache_info``, ``cache_parameters`` and ``__wrapped__`` are there and speak of the patched function.
Taking the last layer off puts the old object back, with what it had cached.
"""

from __future__ import annotations

from functools import _lru_cache_wrapper, lru_cache
from typing import Any, cast

from vllm_graft.patching.functions import Function, functions_in

Cache = _lru_cache_wrapper
"""What ``functools.cache`` and ``lru_cache`` make of a function."""


def uncached(raw: object) -> object:
    """What stands beneath the cache, in the form the target has; the attribute itself where there is no cache."""
    if isinstance(raw, Cache):
        beneath: object = raw.__wrapped__
        return beneath if functions_in(beneath) else raw
    if isinstance(raw, classmethod | staticmethod):
        function = uncached(raw.__func__)
        return raw if function is raw.__func__ else type(raw)(cast(Function, function))
    if isinstance(raw, property):
        parts = [uncached(part) for part in _accessors(raw)]
        same = all(one is other for one, other in zip(parts, _accessors(raw), strict=True))
        return raw if same else _property(parts, raw.__doc__)
    return raw


def recached(raw: object, value: object) -> object:
    """``value``, in the form ``uncached(raw)`` has, behind new caches wherever ``raw`` has one."""
    if isinstance(raw, Cache):
        made = lru_cache(**raw.cache_parameters())(cast(Function, value))
        for name, held in vars(raw).items():
            vars(made).setdefault(name, held)
        return made
    if isinstance(raw, classmethod | staticmethod) and isinstance(value, classmethod | staticmethod):
        return type(raw)(cast(Function, recached(raw.__func__, value.__func__)))
    if isinstance(raw, property) and isinstance(value, property):
        pairs = zip(_accessors(raw), _accessors(value), strict=True)
        parts = [recached(old, new) if new is not None else None for old, new in pairs]
        return _property(parts, value.__doc__)
    return value


def _accessors(raw: property) -> tuple[object, ...]:
    return (raw.fget, raw.fset, raw.fdel)


def _property(parts: list[object], doc: str | None) -> property:
    getter, setter, deleter = cast(list[Any], parts)
    return property(getter, setter, deleter, doc)
