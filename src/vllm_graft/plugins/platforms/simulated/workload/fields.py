"""How the values of a workload's file are checked: a table of keys whose faults are errors with file and line."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from vllm_graft.errors import ConfigError, nearest

MOST: Final = 10_000_000
"""A larger number of tokens or requests is taken for a slip of the pen."""


class Fields:
    """The values of one table or line. ``where`` gives the place of a key, or of the whole for None."""

    def __init__(self, values: object, what: str, where: Callable[[str | None], str]) -> None:
        self._what = what
        self._where = where
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{what} must be a table of keys and values, and is {values!r}", where=where(None), fix="correct it"
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

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf) -> float:
        """A finite number between two bounds."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._unfit(key, value, "a number")
        if not least <= value <= most:
            limits = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
            raise self._unfit(key, value, f"a number, {limits}")
        return float(value)

    def count(self, key: str, default: int | None = None, *, least: int | None = 1) -> int:
        """A whole number; where one is given, not below ``least`` and not above ``MOST``."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise self._unfit(key, value, "a whole number" + ("" if least is None else f", at least {least}"))
        if least is not None and value > MOST:
            raise self._unfit(key, value, f"at most {MOST}")
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
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return self.wrong(key, f"{key} must be {wanted}, and is {shown}", "correct the value")
