"""Public names loaded on first use: the package is imported in every vLLM process, and most need little of it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own costs more to import than all of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's ``__getattr__``: ``homes`` has the module of each public name.

    A home is relative to the package; with a leading dot, to the package's parent.
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        import importlib

        found: object = getattr(importlib.import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, found)
        return found

    return load
