"""Text that is safe to print: characters that would steer a terminal or forge a line are shown, not sent.

Much of what we print was written by others: the message of a plugin's exception, a model's name, a line of a file. An
escape sequence in it could repaint the screen, and a newline could pass for one of our lines in a log.
"""

from __future__ import annotations

import re
from typing import Final

TYPE_CHECKING = False  # typing's own costs more to import than all of this file
if TYPE_CHECKING:
    import logging

_UNSAFE: Final = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters: escape, newline, carriage return, the 8-bit CSI
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reorder what stands around them
    "\u2028\u2029"  # line and paragraph separators
    "\ud800-\udfff"  # halves of a character, which an output in UTF-8 refuses
    "]"
)


def printable(text: str) -> str:
    r"""Return the text on one line, each unsafe character as its Python escape: ``\x1b``, ``\n``, ``\u202e``."""
    return _UNSAFE.sub(_escape, text)


def encodable(text: str) -> str:
    r"""Return the text with each unpaired surrogate as its Python escape: no encoder takes one."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def printable_lines(text: str) -> str:
    """Return the text with its line breaks and tabs kept and every other unsafe character escaped."""
    return re.sub(r"[^\n\t]+", lambda part: printable(part[0]), text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def make_printable(record: logging.LogRecord) -> bool:
    """Filter a logger's records: the message stays on one line and carries no control characters.

    A traceback, which the handler adds, is left as it is.
    """
    message = record.getMessage()
    safe = printable(message)
    if safe != message:
        record.msg, record.args = safe, ()
    return True
