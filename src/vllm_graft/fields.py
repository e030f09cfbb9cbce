"""Values that others wrote, checked as they are read.

- ``Fields``           a user's table: a mistake is a ConfigError with its place
- ``parse_toml``       a user's TOML file
- ``parse_dataclass``  a JSON object that our own process wrote: a fault is a ValueError, the file counts as damaged
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tomllib
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vllm_graft.errors import ConfigError, nearest

D = TypeVar("D")

MAX_COUNT: Final = 10_000_000
"""The largest count, of tokens or requests; a larger one is taken for a typo."""

MAX_NUMBER: Final = 1e9
"""The largest number unless a reader says otherwise. Seconds above it leave a float no room for microseconds."""

_WORD: Final = 1 << 64
"""vLLM's processes exchange MessagePack, whose integers have 64 bits, signed or unsigned."""


class Fields:
    """One table of keys and values.

    what:  its name in errors
    where: gives the place of a key, or of the whole table for None
    """

    texts: ClassVar = False
    """True if numbers may be strings."""

    def __init__(self, values: object, what: str, where: Callable[[str | None], str]) -> None:
        self._what = what
        self._where = where
        if not isinstance(values, Mapping):
            raise self.no_table(values)
        self._values = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def only(self, known: Collection[str]) -> None:
        """Refuse every key but the known ones."""
        for key in self._values:
            if key not in known:
                raise self.unknown(key, nearest(str(key), known))

    def raw(self, key: str) -> Any:
        """Return a value unchecked; None if there is none."""
        return self._values.get(key)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        most: float = MAX_NUMBER,
        wanted: str = "",
    ) -> float:
        """Return a number from ``least`` to ``most``; ``wanted`` describes one in errors, if not by the bounds.

        A number may be a string, as in an environment variable, if ``texts`` of the class is true.
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

    def count(self, key: str, default: int | None = None, *, least: int | None = 1, most: int = MAX_COUNT) -> int:
        """Return a whole number from ``least`` to ``most``; if ``least`` is None, any signed one of 64 bits."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            raise self.unfit(key, value, "a whole number" + ("" if least is None else f", at least {least}"))
        if least is not None and value > most:
            raise self.unfit(key, value, f"at most {most}")
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
        """Return a table with names as keys; empty if there is none."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.unfit(key, value, "a table of names and values")
        if not _fits(value):
            raise self.unfit(key, value, "a table whose whole numbers have 64 bits at most")
        return dict(value)

    def choice(self, key: str, among: Sequence[str]) -> str:
        """Return one of several strings."""
        value = self._values.get(key)
        if value not in among:
            raise self.unfit(key, value, " or ".join(f'"{each}"' for each in among))
        return str(value)

    def names(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.unfit(key, value, "a list of names")
        return value

    def no_table(self, value: object) -> ConfigError:
        """Return the error about a value that is not a table."""
        return self.wrong(None, f"{self._what} must be a table of keys and values, but is {show(value)}", "correct it")

    def unknown(self, key: str, hint: str) -> ConfigError:
        """Return the error about a key that this table does not have."""
        return self.wrong(key, f"{self._what} has no key {key!r}{hint}", "correct or remove the name")

    def wrong(self, key: str | None, what: str, fix: str) -> ConfigError:
        """Return the error that names a key's place."""
        return ConfigError(what, where=self._where(key), fix=fix)

    def unfit(self, key: str, value: object, wanted: str) -> ConfigError:
        """Return the error about a value of another kind."""
        return self.wrong(key, f"{key} must be {wanted}, but is {show(value)}", "correct the value")

    def _given(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(None, f"{self._what} lacks {key!r}", f"add {key}")
        return default


def parse_toml(text: str, file: str) -> dict[str, Any]:
    """Parse a user's TOML file; raise ConfigError with file and line if it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Besides TOMLDecodeError: Python reads no number of more than 4300 digits, nor any depth. Neither has a line.
        line = re.search(r"line (\d+)", str(error))
        at = line[1] if line else len(text.rstrip().splitlines()) if "end of document" in str(error) else None
        place = f"{file}:{at}" if at else file
        raise ConfigError(f"is not valid TOML: {error}", where=place, fix="correct the syntax there") from error


def show(value: object) -> str:
    """Return a value as an error shows it, cut if it is long."""
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
    """Return whether every integer in a value, at any depth, has 64 bits at most."""
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


def parse_dataclass(kind: type[D], data: object, what: str, *, required: Collection[str] = ()) -> D:
    """Make a dataclass of a JSON object; raise ValueError naming a value that is missing or of another type.

    Keys that the class does not have are left out: the writer may be newer. ``required`` are keys that must be there
    although the class has a default for them.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{what} is {_type_of(data)} instead of an object")
    values = {}
    for name, hint, has_default in _fields_of(kind):  # type: ignore[arg-type]
        if name in data:
            values[name] = _convert(data[name], hint, name)
        elif not has_default or name in required:
            raise ValueError(f"{name!r} is missing")
    return kind(**values)


@functools.cache
def _fields_of(kind: type) -> list[tuple[str, Any, bool]]:
    hints = get_type_hints(kind)
    no = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return [(each.name, hints[each.name], (each.default, each.default_factory) != (no, no)) for each in fields]


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Return a JSON value as its type hint says it; raise ValueError if it is not of that type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if not isinstance(value, str) or value not in args:
            raise ValueError(f"{name!r} has a value that is not among {', '.join(map(str, args))}")
        return value
    if origin in (Union, types.UnionType):
        for each in args:
            try:
                return _convert(value, each, name)
            except ValueError:
                continue
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(_convert(each, args[0], name) for each in value)
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _convert(each, args[1], name) for key, each in value.items()}
    elif dataclasses.is_dataclass(hint):
        return parse_dataclass(hint, value, f"a value of {name!r}")  # type: ignore[arg-type]
    elif origin is None and _is_of_type(value, hint):
        return value
    raise ValueError(f"{name!r} is {_type_of(value)} instead of {getattr(origin or hint, '__name__', hint)}")


def _is_of_type(value: object, kind: type) -> bool:
    # In Python true is an integer, and an integer is not a float.
    return isinstance(value, bool) is (kind is bool) and isinstance(value, (int, float) if kind is float else kind)


def _type_of(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
