"""Fits the arguments of a call to a signature, as Python does when the call is made, and one signature to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_graft.audit.model import Arguments


def misfit(arguments: Arguments, signature: Sequence[str]) -> str:
    """Why a call does not fit the parameters, in words; empty where it does, or where only running shows that.

    The signature is written as ``upstream.fingerprint.signature`` does, without what the definition is and without a
    parameter that is already bound.
    """
    parameters = [_Parameter.parse(token) for token in signature]
    return "; ".join(_misfits(arguments, parameters))


def refusals(own: Sequence[str], upstream: Sequence[str]) -> frozenset[str]:
    """What a function refuses of the calls that upstream's signature allows; empty where it takes them all.

    Both without a parameter that is already bound.
    """
    mine, theirs = ([_Parameter.parse(token) for token in each] for each in (own, upstream))
    return frozenset(_refusals(mine, theirs))


def rejects(own: Sequence[str], upstream: Sequence[str]) -> str:
    """Why no call that upstream's signature allows fits a function, in words; empty where some do.

    Tried are the fewest and the most arguments, by position and by keyword.
    """
    theirs = [_Parameter.parse(token) for token in upstream]
    if any(one.rest for one in theirs):
        return ""
    said = []
    for full in (False, True):
        given = [one for one in theirs if full or not one.optional]
        places = [one for one in given if one.place]
        names = tuple(one.name for one in given if not one.place)
        only = [one for one in places if not one.keyword]
        said.append(misfit(Arguments(len(places), names), own))
        named = tuple(one.name for one in places if one.keyword)
        said.append(misfit(Arguments(len(only), (*named, *names)), own))
    return said[0] if all(said) else ""


def _refusals(mine: Sequence[_Parameter], theirs: Sequence[_Parameter]) -> Iterator[str]:
    rest = {one.rest for one in mine}
    places = [one.name for one in mine if one.place]
    names = {one.name for one in mine if one.keyword}
    given = {one.name for one in theirs if not one.rest}
    for place, one in enumerate(parameter for parameter in theirs if parameter.place):
        if one.keyword and one.name not in names and "**" not in rest:
            yield f"it does not take {one.name!r}"
        elif place >= len(places) and "*" not in rest and not (one.keyword and "**" in rest):
            yield f"it does not take {one.name!r} by position"
        elif one.name in places and places.index(one.name) != place:
            yield f"it takes {one.name!r} at another place"
    for one in theirs:
        if not one.rest and not one.place and one.name not in names and "**" not in rest:
            yield f"it does not take {one.name!r}"
    anything = any(one.rest == "**" for one in theirs)
    yield from (f"it needs {one.name!r}" for one in mine if not one.optional and one.name not in given and not anything)


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    place: bool
    keyword: bool
    rest: str
    optional: bool

    @classmethod
    def parse(cls, token: str) -> _Parameter:
        bare = token.removeprefix("kw ").removeprefix("/").removesuffix("=").lstrip("*")
        rest = token[: len(token) - len(token.lstrip("*"))]
        return cls(
            name=bare,
            place=not rest and not token.startswith("kw "),
            keyword=not rest and not token.startswith("/"),
            rest=rest,
            optional=bool(rest) or token.endswith("="),
        )


def _misfits(arguments: Arguments, parameters: Sequence[_Parameter]) -> Iterator[str]:
    places = [one for one in parameters if one.place]
    by_place = [one.name for one in places[: arguments.positional]]
    names = {one.name for one in parameters if one.keyword}
    if arguments.positional > len(places) and not any(one.rest == "*" for one in parameters):
        taken = f"{len(places) or 'no'} argument{'' if len(places) == 1 else 's'}"
        given = f"{arguments.positional} {'is' if arguments.positional == 1 else 'are'} given"
        yield f"it takes {taken} by position, {given}"
    if not any(one.rest == "**" for one in parameters):
        unknown = [name for name in arguments.keywords if name not in names]
        if unknown:
            yield f"it takes no {_listed(unknown)}"
    twice = [name for name in arguments.keywords if name in by_place and name in names]
    if twice:
        yield f"{_listed(twice)} is given by position and by keyword"
    filled = {*(name for name in arguments.keywords if name in names), *by_place}
    missing = [one.name for one in parameters if not one.optional and one.name not in filled]
    if arguments.unpacks_keywords:
        missing = []
    elif arguments.unpacks:
        missing = [one.name for one in parameters if one.name in missing and not one.place]
    if missing:
        yield f"it needs {_listed(missing)}"


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
