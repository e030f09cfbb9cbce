"""Decode the bytes of a source file and parse its text, whatever is in it."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from pathlib import Path
from typing import Final

LARGEST: Final = 64 << 20
"""The most bytes of one source file: the largest of vLLM 0.32 has 0.3 MB."""


def read_text(path: Path) -> str | None:
    """Return the text of a regular file; None for a pipe, a device, and what is too large or cannot be read."""
    try:
        # A pipe or /dev/zero would be read for ever.
        if not path.is_file() or path.stat().st_size > LARGEST:
            return None
        return decode(path.read_bytes())
    except OSError:
        return None


def decode(data: bytes) -> str:
    """Return source text in the encoding that it declares, with ``\\n`` as line end; bad bytes are replaced."""
    try:
        return importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str) -> ast.Module:
    """Parse source text without the compiler's warnings; SyntaxError or ValueError where it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            # Invalid escape sequences in a plugin are its author's affair.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return ast.parse(text)
    except (RecursionError, MemoryError) as error:
        # The parser's stack is limited: a sum of ten thousand terms is valid Python and still too deep.
        raise SyntaxError("it is nested too deeply") from error
