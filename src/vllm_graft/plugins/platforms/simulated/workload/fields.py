"""How the values of a workload's file are checked: a table of keys whose faults are errors with file and line."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from vllm_graft.errors import ConfigError, nearest

MOST: Final = 10_000_000
"""A larger number of tokens or requests is taken for a slip of the pen."""

LARGEST: Final = 1e9
"""So is a larger number of seconds, after which a float has no room for microseconds, and any other above it."""

_WORD: Final = 1 << 64
"""What vLLM's processes send to each other is MessagePack, whose whole numbers have 64 bits, with or without a sign."""


class Fields:
    """The values of one table or line. ``where`` gives the place of a key, or of the whole for None."""

    def __init__(self, values: object, what: str, where: Callable[[str | None], str]) -> None:
        self._what = what
        self._where = where
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{what} must be a table of keys and values, and is {shown(values)}",
                where=where(None),
                fix="correct it",
            )
        self._values = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def only(self, known: Collection[str]) -> None:
        """Refuses every other key."""
        for key in self._values:
            if key not in known:
                raise self.wrong(key, f"{self._what} has no key {key!r}{nearest(str(key), known)}", "correct the name")

    def raw(self, key: str) -> Any:
        """The value as it is; None where there is none."""
        return self._values.get(key)

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = LARGEST) -> float:
        """A number between two bounds."""
        value = self._given(key, default)
        # A whole number may be too large for a float: it is compared as it is, and only then made one.
        if isinstance(value, bool) or not isinstance(value, int | float) or _is_nan(value):
            raise self._unfit(key, value, "a number")
        if value < least:
            raise self._unfit(key, value, f"a number, at least {least:g}")
        if value > most:
            raise self._unfit(key, value, f"a number, at most {most:g}")
        return float(value)

    def count(self, key: str, default: int | None = None, *, least: int | None = 1) -> int:
        """A whole number from ``least`` to ``MOST``; any that has 64 bits with its sign where ``least`` is None."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise self._unfit(key, value, "a whole number" + ("" if least is None else f", at least {least}"))
        if least is not None and value > MOST:
            raise self._unfit(key, value, f"at most {MOST}")
        if not -_WORD // 2 <= value < _WORD // 2:
            raise self._unfit(key, value, "a whole number of 64 bits at most")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string that is not empty."""
        value = self._given(key, default)
        if not isinstance(value, str) or (not value and key in self):
            raise self._unfit(key, value, "a string that is not empty")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A table with names as keys; empty where there is none."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self._unfit(key, value, "a table of names and values")
        if not _fits(value):
            raise self._unfit(key, value, "a table whose whole numbers have 64 bits at most")
        return dict(value)

    def wrong(self, key: str | None, what: str, fix: str) -> ConfigError:
        """The error that names a key's place."""
        return ConfigError(what, where=self._where(key), fix=fix)

    def _given(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(None, f"{self._what} lacks {key!r}", f"add {key}")
        return default

    def _unfit(self, key: str, value: object, wanted: str) -> ConfigError:
        return self.wrong(key, f"{key} must be {wanted}, and is {shown(value)}", "correct the value")


def shown(value: object) -> str:
    """A value as an error shows it: its beginning, where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no more than 4300 digits, nor any depth
        return "too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_nan(value: float) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _fits(value: object) -> bool:
    """Whether every whole number in a value, however deep, has 64 bits at most."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, int) and not -_WORD // 2 <= each < _WORD:
            return False
    return True
