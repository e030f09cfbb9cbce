"""JSON byte by byte: what may come next, what is open, and how many bytes it takes to close it.

A state is a mode, a tally and a stack of what is open. Two things JSON leaves open are bounded here, because models
run away with them: blanks (one, or a line break and the next line's indentation) and the digits of numbers.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from vllm_graft.plugins.samplers.constrained_json import in_string

Root = Literal["object", "any"]

# The stack is a string with a character for each open container.
_ARRAY, _KEYS, _VALUES = "[", "{", ":"
"""An array; an object of which a key is due or being read; an object of which a value is."""

# Modes below STRINGS are those inside of a string.
STRINGS: Final = len(in_string.NEXT)
(_ROOT, _VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER) = range(STRINGS, STRINGS + 7)
(_MINUS, _ZERO, _WHOLE, _POINT, _FRACTION, _E, _SIGN, _POWER) = range(STRINGS + 7, STRINGS + 15)
(_TRUE, _FALSE, _NULL, _DONE) = range(STRINGS + 15, STRINGS + 19)

_FRESH: Final = -1
"""The tally of a gap in which no blank came yet; after that it is how many more may come."""

_INDENT: Final = 4
"""The most blanks that a line may begin with, for each container that is open."""

_WORDS: Final = {_TRUE: b"true", _FALSE: b"false", _NULL: b"null"}
_DIGITS: Final = {_WHOLE: 20, _FRACTION: 20, _POWER: 3}
_NUMBERS: Final = {
    _MINUS: {b"0": _ZERO, b"123456789": _WHOLE},
    _ZERO: {b".": _POINT, b"eE": _E},
    _WHOLE: {b"0123456789": _WHOLE, b".": _POINT, b"eE": _E},
    _POINT: {b"0123456789": _FRACTION},
    _FRACTION: {b"0123456789": _FRACTION, b"eE": _E},
    _E: {b"0123456789": _POWER, b"+-": _SIGN},
    _SIGN: {b"0123456789": _POWER},
    _POWER: {b"0123456789": _POWER},
}
_NUMBER_STEPS: Final = {
    mode: {byte: to for signs, to in leads.items() for byte in signs} for mode, leads in _NUMBERS.items()
}
_FINISHED: Final = (_ZERO, _WHOLE, _FRACTION, _POWER)
_VALUE_STARTS: Final = {
    **dict.fromkeys(b"123456789", _WHOLE),
    ord("0"): _ZERO,
    ord("-"): _MINUS,
    ord("t"): _TRUE,
    ord("f"): _FALSE,
    ord("n"): _NULL,
}
# The fewest bytes to the end of the value that the mode stands in, or is about to begin; a key needs its value too.
_COSTS: Final = {_ROOT: 2, _VALUE: 1, _KEY: len('"":0'), _COLON: len(":0"), _MINUS: 1, _POINT: 1, _E: 1, _SIGN: 1}


class JsonState(NamedTuple):
    """A position in a document.

    mode:  what is being read; a mode of ``in_string`` inside of a string
    tally: of a gap, how many blanks may still come; of a number, its digits; of a word, its letters
    stack: a character for each open container, the innermost last
    """

    mode: int
    tally: int
    stack: str


END: Final = JsonState(_DONE, 0, "")
"""After a complete document."""


def start(root: Root) -> JsonState:
    """Return the state before the first byte."""
    return JsonState(_ROOT if root == "object" else _VALUE, _FRESH, "")


def step(state: JsonState, byte: int, depth: int) -> JsonState | None:
    """Return the state after one more byte, with at most ``depth`` containers open; None if it may not come."""
    mode, tally, stack = state
    if mode < STRINGS:
        to = in_string.NEXT[mode][byte]
        if to == in_string.CLOSED:
            return end_string(stack)
        return JsonState(to, 0, stack) if to != in_string.NOWHERE else None
    if mode in _NUMBER_STEPS:
        if byte in _NUMBER_STEPS[mode]:
            to = _NUMBER_STEPS[mode][byte]
            digits = tally + 1 if to == mode else 1
            return JsonState(to, digits, stack) if digits <= _DIGITS.get(to, 1) else None
        # A number has no end of its own: what follows the value ends it.
        return step(_ended(stack), byte, 0) if mode in _FINISHED else None
    if mode in _WORDS:
        word = _WORDS[mode]
        if byte != word[tally]:
            return None
        return JsonState(mode, tally + 1, stack) if tally + 1 < len(word) else _ended(stack)
    if mode == _DONE:
        return None
    if byte in b" \n\t":
        if tally == _FRESH:
            left = {ord(" "): 0, ord("\n"): _INDENT * len(stack)}.get(byte)
            return None if left is None else JsonState(mode, left, stack)
        return JsonState(mode, tally - 1, stack) if tally > 0 and byte in b" \t" else None
    sign = chr(byte)
    if mode == _AFTER:
        in_array = stack[-1] == _ARRAY
        if sign == ",":
            return JsonState(_VALUE, _FRESH, stack) if in_array else JsonState(_KEY, _FRESH, stack[:-1] + _KEYS)
        return _ended(stack[:-1]) if sign == ("]" if in_array else "}") else None
    if mode == _COLON:
        return JsonState(_VALUE, _FRESH, stack[:-1] + _VALUES) if sign == ":" else None
    if mode in (_KEY, _FIRST_KEY):
        if sign == '"':
            return JsonState(in_string.PLAIN, 0, stack)
        return _ended(stack[:-1]) if sign == "}" and mode == _FIRST_KEY else None
    if sign == "]" and mode == _FIRST_ITEM:
        return _ended(stack[:-1])
    # A value begins.
    if sign in "{[":
        if len(stack) >= depth or (mode == _ROOT and sign == "["):
            return None
        opened, first = (_KEYS, _FIRST_KEY) if sign == "{" else (_ARRAY, _FIRST_ITEM)
        return JsonState(first, _FRESH, stack + opened)
    if mode == _ROOT:
        return None
    if sign == '"':
        return JsonState(in_string.PLAIN, 0, stack)
    return JsonState(_VALUE_STARTS[byte], 1, stack) if byte in _VALUE_STARTS else None


def end_string(stack: str) -> JsonState:
    """Return the state after a closing quote: a key's colon is due, or a value has ended."""
    return JsonState(_COLON, _FRESH, stack) if stack[-1:] == _KEYS else _ended(stack)


def complete(state: JsonState) -> bool:
    """Return whether the bytes so far are a document."""
    return state.mode == _DONE or (not state.stack and state.mode in _FINISHED)


def cost(state: JsonState) -> int:
    """Return the fewest bytes that complete the document."""
    mode, tally, stack = state
    if mode < STRINGS:
        own = in_string.COST[mode] + (_COSTS[_COLON] if stack[-1:] == _KEYS else 0)
    elif mode in _WORDS:
        own = len(_WORDS[mode]) - tally
    else:
        own = _COSTS.get(mode, 0)
    return own + len(stack)


def _ended(stack: str) -> JsonState:
    return JsonState(_AFTER, _FRESH, stack) if stack else END
