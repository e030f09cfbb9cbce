"""The values of a table that a user wrote: each is checked as it is read, and a fault is an error with its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final

from vllm_graft.errors import ConfigError, nearest

MOST: Final = 10_000_000
"""The largest count, of tokens or requests; a larger one is taken for a typing error."""

LARGEST: Final = 1e9
"""The largest number unless a reader says otherwise. Seconds above it leave a float no room for microseconds."""

_WORD: Final = 1 << 64
"""vLLM's processes exchange MessagePack, whose integers have 64 bits, signed or unsigned."""


class Fields:
    """One table of keys and values.

    what:  its name in errors
    where: gives the place of a key, or of the whole table for None
    """

    texts: ClassVar = False
    """Whether numbers may be strings."""

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
        """Refuse every key but the known ones."""
        for key in self._values:
            if key not in known:
                fix = "correct the name or take it out"
                raise self.wrong(key, f"{self._what} has no key {key!r}{nearest(str(key), known)}", fix)

    def raw(self, key: str) -> Any:
        """Return a value unchecked; None where there is none."""
        return self._values.get(key)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        most: float = LARGEST,
        wanted: str = "",
    ) -> float:
        """Return a number from ``least`` to ``most``; ``wanted`` describes one in errors, if not by the bounds.

        A number may be a string, as in an environment variable, where ``texts`` of the class is true.
        """
        value = self._given(key, default)
        number = _as_number(value) if self.texts else value
        # An integer may be too large for a float: it is compared first and converted afterwards. NaN equals nothing.
        if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
            raise self.unfit(key, value, wanted or "a number")
        if number < least:
            raise self.unfit(key, value, wanted or f"a number, at least {least:g}")
        if number > most:
            raise self.unfit(key, value, wanted or f"a number, at most {most:g}")
        return float(number)

    def count(self, key: str, default: int | None = None, *, least: int | None = 1) -> int:
        """Return a whole number from ``least`` to ``MOST``; where ``least`` is None, any signed one of 64 bits."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise self.unfit(key, value, "a whole number" + ("" if least is None else f", at least {least}"))
        if least is not None and value > MOST:
            raise self.unfit(key, value, f"at most {MOST}")
        if not -_WORD // 2 <= value < _WORD // 2:
            raise self.unfit(key, value, "a whole number of 64 bits at most")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string that is not empty."""
        value = self._given(key, default)
        if not isinstance(value, str) or (not value and key in self):
            raise self.unfit(key, value, "a string that is not empty")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """Return true, false, or the default."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.unfit(key, value, "true or false")
        return default if value is None else value

    def table(self, key: str) -> dict[str, Any]:
        """Return a table with names as keys; empty where there is none."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.unfit(key, value, "a table of names and values")
        if not _fits(value):
            raise self.unfit(key, value, "a table whose whole numbers have 64 bits at most")
        return dict(value)

    def wrong(self, key: str | None, what: str, fix: str) -> ConfigError:
        """Return the error that names a key's place."""
        return ConfigError(what, where=self._where(key), fix=fix)

    def unfit(self, key: str, value: object, wanted: str) -> ConfigError:
        """Return the error about a value of another kind."""
        return self.wrong(key, f"{key} must be {wanted}, and is {shown(value)}", "correct the value")

    def _given(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(None, f"{self._what} lacks {key!r}", f"add {key}")
        return default


def shown(value: object) -> str:
    """Return a value as an error shows it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints at most 4300 digits, and limited depth
        return "too long to be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _as_number(value: object) -> object:
    """Convert a string that is a finite number; anything else stays."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _fits(value: object) -> bool:
    """Say whether every integer in a value, at any depth, has 64 bits at most."""
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
