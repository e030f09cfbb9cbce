"""What each state of a verdict is called, in which tone it is shown, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vllm_graft.audit.model import State

Tone = Literal["ok", "body", "sig", "bad", "idle", "news", "none"]
"""A family of states that share a colour; also the name of its class in style sheets."""


@dataclass(frozen=True, slots=True)
class Word:
    """How one state is shown.

    short:  a word or a sign that fits a cell of a matrix
    tone:   its colour
    says:   what it means, as the end of the sentence "The name ..."
    brief:  the same in a word or three, where the short word does not say it
    """

    short: str
    tone: Tone
    says: str
    brief: str = ""


WORDS: Final[Mapping[State, Word]] = {
    "gone": Word("gone", "bad", "is nowhere any more"),
    "broken": Word("sig!", "bad", "has a signature that callers of the old one do not fit", "another signature"),
    "misfit": Word("misfit", "bad", "is there, and the code that uses it does not fit it", "does not fit"),
    "kind": Word("kind", "bad", "is something else now, such as a function where a class was", "something else now"),
    "moved": Word("moved", "bad", "is elsewhere now"),
    "grown": Word("new", "idle", "is added by the package, and upstream has one of its own now", "upstream's too now"),
    "uncalled": Word("uncalled", "idle", "is there, and nothing in vLLM mentions it any more", "never mentioned"),
    "inherited": Word("inherited", "idle", "is no longer defined by the class, but by a base", "from a base"),
    "extended": Word("sig+", "sig", "has new parameters that need not be given", "more parameters"),
    "body": Word("body", "body", "has the same signature and other code", "other code"),
    "fixed": Word("fixed", "news", "has in upstream what the package was there for"),
    "absent": Word("absent", "none", "is in neither release"),
    "same": Word("·", "ok", "is unchanged", "unchanged"),
    "": Word("", "none", "was not judged: the release cannot be read, or the patch is not for it"),
}
"""The word for each state, the worst state first."""

_RANKS: Final[Mapping[State, int]] = {state: len(WORDS) - index for index, state in enumerate(WORDS)}


def weight(state: State) -> int:
    """How much a state asks for a look: more is worse."""
    return _RANKS[state]


def count(number: int, thing: str) -> str:
    """A number and what is counted, in the plural unless it is one."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
