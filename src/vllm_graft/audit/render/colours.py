"""The colours of the matrix, for light and for dark screens, shared by the page and the picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_graft.audit.render.words import Tone

Pair = tuple[str, str]
"""A colour of text and the one behind it."""

LIGHT: Final[Mapping[Tone, Pair]] = {
    "ok": ("#2f6b41", "#e9f4ec"),
    "body": ("#775100", "#fdf0cf"),
    "sig": ("#7c3d00", "#fbd9a5"),
    "bad": ("#9c1c14", "#fbd3ce"),
    "idle": ("#57309c", "#e8dff8"),
    "news": ("#0a4f8c", "#d6e9fb"),
    "none": ("#68707a", "#f4f5f6"),
}
DARK: Final[Mapping[Tone, Pair]] = {
    "ok": ("#86c596", "#15261a"),
    "body": ("#e6bd66", "#332a12"),
    "sig": ("#ffc078", "#553310"),
    "bad": ("#ffaaa1", "#561e1b"),
    "idle": ("#cbb2ff", "#31244e"),
    "news": ("#8ecaf9", "#14344f"),
    "none": ("#949ca6", "#1b1e22"),
}

PAPER: Final[Mapping[str, Pair]] = {
    "ink": ("#1c2024", "#e4e7eb"),
    "soft": ("#5c646e", "#98a1ac"),
    "paper": ("#ffffff", "#121417"),
    "line": ("#e3e6e9", "#2a2e34"),
    "link": ("#0a58a8", "#8ecaf9"),
}
"""The rest of the page: for light screens first, then for dark ones."""


def variables(selector: str) -> str:
    """Rules that set the colours as variables: ``--body`` for text, ``--body-bg`` behind it, ``--ink``, ``--paper``."""
    light = _declarations(LIGHT, 0)
    dark = _declarations(DARK, 1)
    return f"{selector}{{{light}}}\n@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def _declarations(tones: Mapping[Tone, Pair], screen: int) -> str:
    parts = [f"--{name}:{pair[screen]}" for name, pair in PAPER.items()]
    parts += [f"--{tone}:{text};--{tone}-bg:{behind}" for tone, (text, behind) in tones.items()]
    return ";".join(parts)
