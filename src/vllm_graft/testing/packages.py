"""Packages laid out in a folder: real distributions with real entry points, seen by every child, never installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def lay_out(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str] | None = None
) -> None:
    """Write a distribution into a folder: its metadata, its entry points by group, its modules by name.

    A process that has the folder on ``PYTHONPATH`` (see ``python_path``) finds it as if it were installed.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    groups = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items()) + "\n"
        for group, entries in entry_points.items()
    )
    (info / "entry_points.txt").write_text(groups, encoding="utf-8")
    for module, text in (modules or {}).items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")


def python_path(*folders: Path) -> str:
    """Return a value for ``PYTHONPATH`` with these folders before those that are there."""
    before = [str(folder) for folder in folders]
    present = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*before, present] if present else before)
