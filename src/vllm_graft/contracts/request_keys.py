"""Keys that a request may carry for a sampler, with a type, a range and a default, and the values once checked."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

KeyValue = bool | int | float | str | list[str] | list[int]
"""The value of a request's key: what ``vllm_xargs`` lets through."""

KeyKind = Literal["bool", "int", "float", "str", "list[str]", "list[int]", "any"]

# _SAMPLING_EPS of vllm/sampling_params.py, the same from 0.26 to 0.32.
GREEDY_BELOW: Final = 1e-5
"""The temperature below which vLLM takes the most probable token, whatever else is asked."""


_UNSET: Final[Any] = object()

# Up to this length one different letter makes another word rather than a slip.
_SHORTEST: Final = 6


@dataclass(frozen=True, slots=True)
class Key:
    """One key that a request may carry, in ``vllm_xargs`` or at the top level of its body.

    name:    as clients send it
    kind:    its type in words; ``any`` leaves checking to the strategy
    default: what holds if a request does not carry it; 0, False, or an empty string or list if none is declared
    low:     the least value allowed; for a list the least length
    high:    the greatest value allowed; for a list the greatest length
    aliases: other names for the same key, as other servers' clients send it
    help:    one line for people
    switch:  a request asks for the strategy only if this key differs from its default; if no key of a strategy is a
             switch, any of its keys asks for it
    """

    name: str
    kind: KeyKind = "any"
    default: KeyValue = _UNSET
    low: float | None = None
    high: float | None = None
    aliases: tuple[str, ...] = ()
    help: str = ""
    switch: bool = False

    def __post_init__(self) -> None:
        if self.default is _UNSET:
            object.__setattr__(self, "default", _KINDS[self.kind if self.kind in KINDS else "any"].empty())

    def read(self, value: object, name: str = "") -> KeyValue:
        """Return the value as the sampler gets it; raise a ValueError that names key, value and what is allowed."""
        read = _KINDS[self.kind].read(value)
        if read is None or not self.in_range(read):
            raise ValueError(f"{name or self.name} must be {self.allowed}, but is {_shown(value)}")
        # A list that came as JSON text is decoded by now, and may hold what its text did not show.
        if reason := find_unsendable(read, _DEEPEST):
            raise ValueError(f"{name or self.name} {reason}, so it cannot be sent to the engine")
        return read

    def takes(self, value: object) -> bool:
        """Return whether a value has the key's type; its range is not checked."""
        return _KINDS[self.kind].read(value) is not None

    @property
    def words(self) -> str:
        """The key's type in words."""
        return _KINDS[self.kind].words

    @property
    def allowed(self) -> str:
        """The values that the key takes, in words."""
        words = self.words
        what = "a length" if self.kind.startswith("list") else "a value"
        if self.low is not None and self.high is not None:
            return f"{words}, with {what} from {self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"{words}, with {what} of at least {self.low:g}"
        if self.high is not None:
            return f"{words}, with {what} of at most {self.high:g}"
        return words

    def as_dict(self) -> dict[str, object]:
        """Return the key with stable lower-case names, for ``GET /graft/samplers``."""
        return {
            "name": self.name,
            "type": self.kind,
            # JSON has neither infinity nor NaN, and an infinite limit is no limit.
            "default": str(self.default) if _is_not_finite(self.default) else self.default,
            "min": None if _is_not_finite(self.low) else self.low,
            "max": None if _is_not_finite(self.high) else self.high,
            "aliases": list(self.aliases),
            "help": self.help,
            "switch": self.switch,
        }

    def in_range(self, value: KeyValue) -> bool:
        """Return whether a value of the key's type, or the length of a list, lies from ``low`` to ``high``."""
        if isinstance(value, str) or self.kind == "any":
            return True
        size = len(value) if isinstance(value, list) else value
        return (self.low is None or size >= self.low) and (self.high is None or size <= self.high)


@dataclass(slots=True)
class Params:
    """One request, as far as a sampler needs to know it: ``params["dry_multiplier"]`` reads one of its own keys.

    values:      every declared key, with its default if the request does not carry it
    temperature: as the request says it; below 1e-5 vLLM takes the most probable token
    top_p:       as the request says it
    top_k:       as the request says it; 0 or -1: all
    seed:        as the request says it, or None
    max_tokens:  how many tokens the request may generate, or None
    state:       a place of the request's own, empty when it enters and kept until it leaves
    """

    values: Mapping[str, KeyValue]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    state: dict[str, object] = field(default_factory=dict)
    generated_so_far: Callable[[], Sequence[int]] = tuple

    @property
    def greedy(self) -> bool:
        """True if vLLM takes the most probable token of this request."""
        return self.temperature < GREEDY_BELOW

    @property
    def generated(self) -> Sequence[int]:
        """The tokens generated so far. Free on the V1 model runner; on the V2 runner it waits for the device."""
        return self.generated_so_far()

    def __getitem__(self, name: str) -> KeyValue:
        return self.values[name]

    def get(self, name: str, default: object = None) -> object:
        """Look a name up as in a dictionary: a key, else what is in ``state``, else a field such as ``temperature``."""
        for known in (self.values, self.state):
            if name in known:
                return known[name]
        return getattr(self, name) if name in _FIELDS else default

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def number(self, name: str) -> float:
        """Return a key of kind int or float, as a float."""
        value = self.values[name]
        assert isinstance(value, int | float)
        return float(value)


_FIELDS: Final = frozenset({"temperature", "top_p", "top_k", "seed", "max_tokens"})


def read_keys(keys: Sequence[Key], carried: Mapping[str, object]) -> dict[str, KeyValue]:
    """Read the declared keys that a request carries, under their own names; raise a ValueError for a bad value."""
    found: dict[str, KeyValue] = {}
    for key in keys:
        said = [name for name in (key.name, *key.aliases) if name in carried]
        values = [key.read(carried[name], name) for name in said]
        if any(value != values[0] for value in values[1:]):
            pairs = " and ".join(f"{name}={_shown(carried[name])}" for name in said)
            raise ValueError(f"{pairs} conflict: both set {key.name}; send only one")
        if said:
            found[key.name] = values[0]
    return found


def refuse_unsendable(carried: Mapping[str, object]) -> None:
    """Refuse with a ValueError what cannot be sent to an engine: vLLM packs numbers into 64 bits and text as UTF-8."""
    for name, value in carried.items():
        reason = _unsendable(name) or find_unsendable(value, _DEEPEST)
        if reason:
            said = name if name.isidentifier() else _shown(name)
            raise ValueError(f"{said} {reason}, so it cannot be sent to the engine")


def find_unsendable(value: object, deepest: float = math.inf, *, texts_only: bool = False) -> str:
    """Return why a value cannot be sent, as the end of a sentence; empty if it can.

    Lists, tables and objects are followed, ``deepest`` levels down: a vLLM field may hold a JSON schema, which may be
    arbitrarily deep. Long lists of numbers or strings are checked in one go: a request may list every token of a
    vocabulary. With ``texts_only`` numbers may be of any size, as in a field that is not sent to an engine.
    """
    harmless = _HARMLESS | {int} if texts_only else _HARMLESS
    # Nearly all that requests carry are single values.
    if type(value) in harmless:
        return ""
    if isinstance(value, str | int):
        return _unsendable(value)
    level: list[Collection[object]] = [(value,)]
    seen: set[int] = set()
    depth = 0
    while level:
        deeper: list[Collection[object]] = []
        for parts in level:
            kinds = set(map(type, parts))
            if kinds <= harmless:
                continue
            if kinds == {int}:
                reason = _unsendable(min(parts)) or _unsendable(max(parts))  # type: ignore[type-var, arg-type]
            elif kinds == {str}:
                reason = _unsendable("".join(parts))  # type: ignore[arg-type]
            else:
                reason = ""
                for part in parts:
                    if isinstance(part, str) or (isinstance(part, int) and not texts_only):
                        reason = reason or _unsendable(part)
                    elif type(part) not in harmless and id(part) not in seen:
                        seen.add(id(part))
                        deeper += _contents(part)
            if reason:
                return reason
        if deeper and depth == deepest:
            return f"is nested more than {deepest} levels deep"
        level, depth = deeper, depth + 1
    return ""


def _unsendable(value: str | int) -> str:
    if isinstance(value, str):
        return "" if value.isascii() or not _SURROGATE.search(value) else "contains an unpaired surrogate"
    return "" if -(1 << 63) <= value < 1 << 64 else "holds a whole number that takes more than 64 bits"


def _contents(value: object) -> tuple[Collection[object], ...]:
    """Return what is in a list, a table or an object with declared fields, such as a vLLM request."""
    if isinstance(value, Mapping):
        return value.keys(), value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return (value,)
    names = ("__struct_fields__", "__dataclass_fields__", "__pydantic_fields_set__")
    fields = next(filter(None, (getattr(value, name, ()) for name in names)), ())
    return ([getattr(value, name, None) for name in fields],)


_HARMLESS: Final = frozenset({type(None), bool, float})
# Python keeps an unpaired surrogate from JSON such as "\ud800"; msgpack, by which vLLM's processes talk, does not.
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_DEEPEST: Final = 64


_SHORT: Final = reprlib.Repr()
"""A repr that costs the same however large the value is."""
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict, _SHORT.maxstring = 3, 20, 20, 5, 200


def _shown(value: object) -> str:
    """Return a value for a message: one short line that any terminal and any encoder can take."""
    try:
        text = _SHORT.repr(value)
    except (RecursionError, ValueError):
        # Lists nested deeper than Python follows, or a number of more digits than it prints.
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        # An integer of JSON may have more digits than a float can hold.
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        # Converting through float would lose precision for large integers.
        return value
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _flag(value: object) -> bool | None:
    # vLLM hands true and false through as 1 and 0.
    return bool(value) if isinstance(value, int) and value in (0, 1) else None


def _items(value: object) -> list[object] | None:
    if isinstance(value, str):
        # Some clients send a list as the JSON text of one.
        import json

        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return list(value) if isinstance(value, list | tuple) else None


def _texts(value: object) -> list[str] | None:
    items = _items(value)
    return [str(item) for item in items] if items is not None and all(isinstance(i, str) for i in items) else None


def _wholes(value: object) -> list[int] | None:
    items = _items(value)
    read = [_whole(item) for item in items] if items is not None else [None]
    return [item for item in read if item is not None] if None not in read else None


class _KindInfo(NamedTuple):
    """One type of keys: its name in messages, the default if none is declared, and the reader of a value."""

    words: str
    empty: Callable[[], KeyValue]
    read: Callable[[Any], KeyValue | None]


_KINDS: Final[Mapping[KeyKind, _KindInfo]] = {
    "bool": _KindInfo("true or false", bool, _flag),
    "int": _KindInfo("a whole number", int, _whole),
    "float": _KindInfo("a number", float, _number),
    "str": _KindInfo("a string", str, lambda value: value if isinstance(value, str) else None),
    "list[str]": _KindInfo("a list of strings", list, _texts),
    "list[int]": _KindInfo("a list of whole numbers", list, _wholes),
    "any": _KindInfo("anything", int, lambda value: value),
}

KINDS: Final = tuple(_KINDS)
"""Every type that a key may have."""


def is_similar(name: str, known: str) -> bool:
    """Return whether a name is probably a known one misspelt: a few letters wrong, missing, added or exchanged.

    Case, ``-`` and ``_`` do not count. One letter in eight may be wrong at most, so that ``threshold`` is not taken for
    ``xtc_threshold``; in a name of up to six letters none: ``sigma`` is another word than ``nsigma``.
    """
    one, other = (text.lower().replace("_", "").replace("-", "") for text in (name, known))
    limit = (len(other) + 3) // 8 if len(other) > _SHORTEST else 0
    return abs(len(one) - len(other)) <= limit and _edits(one, other, limit) <= limit


def _edits(one: str, other: str, limit: int) -> int:
    """Count the edits from one string to the other, swaps of neighbours included; ``limit + 1`` stands for any more.

    The optimal string alignment distance, row by row; it stops early, so that its cost is bounded by the limit.
    """
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    one, other = one[start:], other[start:]
    end = 0
    while end < min(len(one), len(other)) and one[-1 - end] == other[-1 - end]:
        end += 1
    one, other = one[: len(one) - end], other[: len(other) - end]
    before: list[int] = []
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, last, row = row, before, [number]
        for at, theirs in enumerate(other, 1):
            cost = min(row[-1] + 1, before[at] + 1, before[at - 1] + (letter != theirs))
            if number > 1 and at > 1 and letter == other[at - 2] and one[number - 2] == theirs:
                cost = min(cost, last[at - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
    return row[-1]
