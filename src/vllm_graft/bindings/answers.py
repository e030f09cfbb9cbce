"""What a scheduling policy answered, held against what there is: every request in its place, and in one only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter, is_
from typing import Final, TypeVar

from vllm_graft.contracts import RequestView, Schedule

KEYS: Final = ("prefill_requests", "decode_requests", "preempt_requests")
"""The keys of an answer that is a dictionary, in the order of the fields of ``Schedule``."""

_V = TypeVar("_V", bound=RequestView)
_NAME: Final[Callable[[RequestView], str]] = attrgetter("request_id")
_LISTS: Final = (list, tuple, set, frozenset, deque)


def read_answer(answer: object, waiting: Mapping[str, _V], running: Mapping[str, _V]) -> tuple[list[_V], list[_V]]:
    """The requests to start, in order, and those to preempt; ValueError with the reason where that cannot be done.

    No code of the policy's runs here: what it gave is a list of views, or is refused.
    """
    prefill, decode, preempt = _parts(answer)
    starting = _named("prefill", prefill, waiting, running, "is running")
    stopping = _named("preempt", preempt, running, waiting, "is waiting, and has nothing to give back")
    if decode is not None:
        going = _named("decode", decode, running, waiting, "is waiting")
        _check_division(set(map(_NAME, going)), set(map(_NAME, stopping)), running)
    return starting, stopping


def _parts(answer: object) -> tuple[object, object, object]:
    if isinstance(answer, Schedule):
        return answer.prefill, answer.decode, answer.preempt
    if not isinstance(answer, dict):
        raise ValueError(f"it is {type(answer).__name__}, and must be a Schedule or a dictionary with {list(KEYS)}")
    if set(answer) != set(KEYS):
        raise ValueError(f"its keys are {[str(key) for key in answer]}, and must be {list(KEYS)}")
    if answer[KEYS[1]] is None:
        raise ValueError(f"{KEYS[1]} is None")
    return answer[KEYS[0]], answer[KEYS[1]], answer[KEYS[2]]


def _check_division(going: set[str], stopping: set[str], running: Collection[str]) -> None:
    both = next(iter(going & stopping), None)
    if both is not None:
        raise ValueError(f"{both!r} is in decode and in preempt")
    if len(going) + len(stopping) < len(running):
        left = next(name for name in running if name not in going and name not in stopping)
        raise ValueError(f"{left!r} runs, and is neither in decode nor in preempt")


def _named(part: str, listed: object, known: Mapping[str, _V], others: Mapping[str, _V], elsewhere: str) -> list[_V]:
    """The requests of one list, compared as a whole: thousands may be named in every step."""
    if not isinstance(listed, _LISTS):
        raise ValueError(f"{part} is {type(listed).__name__}, and must be a list of requests")
    views = list(listed)
    strange = next((kind for kind in set(map(type, views)) if not issubclass(kind, RequestView)), None)
    if strange is not None:
        raise ValueError(f"{part} holds {strange.__name__}, which is none of the requests that it was given")
    names = list(map(_NAME, views))
    if len(set(names)) < len(names):
        raise ValueError(f"{part} names {_doubled(names)!r} twice")
    mine = [*map(known.get, names)]
    # By identity: a class of the policy's own may say that it equals anything.
    if not all(map(is_, mine, views)):
        at = next(number for number, view in enumerate(views) if mine[number] is not view)
        fault = elsewhere if others.get(names[at]) is views[at] else "is none of the requests that it was given"
        raise ValueError(f"{part} names {names[at]!r}, which {fault}")
    return views


def _doubled(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
