"""Find a module's file by its dotted name, without importing the module or the packages above it.

``importlib.util.find_spec("vllm.v1.engine")`` would import ``vllm`` first, which takes seconds.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder


def find_spec(name: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """Return where a module lies, or None if it is not found; a folder without ``__init__.py`` has no loader.

    path:  the folders to search; None for what this interpreter would import
    """
    *_, last = specs(name, path)
    return last


def specs(name: str, path: Sequence[str] | None = None) -> Iterator[ModuleSpec | None]:
    """Yield the spec of each package on the way to a module and its own; None ends the way if one is not found."""
    parts = name.split(".")
    spec = _find_top(parts[0], path)
    yield spec
    for done in range(2, len(parts) + 1):
        if spec is None:
            return
        spec = find_in(".".join(parts[:done]), list(spec.submodule_search_locations or ()))
        yield spec


def find_in(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Find one module in folders: those of its package, or of a search path for a top-level name."""
    try:
        spec = PathFinder.find_spec(name, list(folders))
    except KeyError:
        # A nested namespace package: Python looks its parent up in sys.modules, where it is not.
        return _namespace(name, folders)
    except (ImportError, ValueError):
        return None
    return spec if spec is None or spec.loader is not None else _namespace(name, folders)


def _find_top(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if path is None:
        try:
            return importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
    if (spec := find_in(name, path)) is not None:
        return spec
    # Built-in modules, and what an editable install maps by a finder of its own.
    for finder in sys.meta_path:
        if finder is not PathFinder and hasattr(finder, "find_spec"):
            try:
                spec = finder.find_spec(name, None)
            except (ImportError, ValueError, AttributeError):
                continue
            if spec is not None:
                return spec
    return None


def _namespace(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the spec of a folder without ``__init__.py``, which Python spreads over all folders of that name."""
    places = (os.path.join(folder, name.rpartition(".")[2]) for folder in path)
    folders = [place for place in places if os.path.isdir(place)]
    if not folders:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = folders
    return spec


def source_of(spec: ModuleSpec) -> str | None:
    """Return a module's text from its loader, be it in a zip file; None for compiled code and unreadable files."""
    try:
        text: str | None = getattr(spec.loader, "get_source", lambda name: None)(spec.name)
    except (ImportError, OSError, SyntaxError, ValueError):
        return None
    return text
