"""Looking for a name that is no longer where it was: a class or function of that name elsewhere in the package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

_MOST: Final = 3


def moved_to(module: str, name: str) -> list[str]:
    """Where the installed package that ``module`` belongs to defines ``name`` now, a few places at most."""
    package = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    found: list[str] = []
    defined = re.compile(rf"^(?:class|def|async def) {re.escape(name)}\b".encode(), re.MULTILINE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).rglob("*.py")):
            if len(found) < _MOST and name.encode() in (text := file.read_bytes()) and defined.search(text):
                found.append(f"{_module(package, Path(folder), file)}:{name}")
    return found


def _module(package: str, folder: Path, file: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
