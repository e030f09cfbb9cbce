"""Check code against a release: arguments that do not fit, attributes and methods that are missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_graft.audit.model import Arguments, Use, Verdict
from vllm_graft.audit.releases.outline import OPAQUE, function_marks
from vllm_graft.audit.releases.release import METHODS, Release, Shape, alternatives
from vllm_graft.audit.uses import body_dependencies
from vllm_graft.patching.upstream.fingerprint import Function, parameters
from vllm_graft.patching.upstream.scopes import dotted


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


_SAME: Final = Verdict("same")
_CONFIGS: Final = "vllm.config"


def judge_call(use: Use, before: Sequence[Release], new: Release) -> Verdict:
    """Whether a call still fits what it calls. What is gone is told of where it is named, but for ``super()``."""
    if use.above and (state := _unreachable(use, before, new)):
        return Verdict(state)
    why = _misfit(use, new)
    if not why:
        return _SAME
    base = before[0]
    return Verdict("misfit", f"{why}; it did not fit {base.version} either" if _misfit(use, base) else why)


def _misfit(use: Use, release: Release) -> str:
    """Why a call does not fit a release; empty where it does, or where that cannot be told."""
    if use.arguments is None:
        return ""
    if use.path:
        owner = _owner(use, release)
        places = [(owner.module, f"{owner.qualname}.{use.path[-1]}")] if owner is not None else []
    else:
        places = [(use.module, use.qualname), *use.owners]
    for module, qualname in places:
        found = release.shape(module, qualname)
        if found is not None:
            return "" if found.opaque else _against(use, found, release)
        if use.bound and qualname.endswith(".__init__") and (made := _generated(release, module, qualname)) is not None:
            return _all_fit(use, made)
        if use.bound and _answers(release, module, qualname):
            return ""
    return ""


def _generated(release: Release, module: str, qualname: str) -> Sequence[Sequence[str]] | None:
    """The constructor that a decorator writes, where ``super().__init__`` has no other."""
    made = release.constructor(module, qualname.removesuffix(".__init__"))
    return made[-1:] if made is not None and made != ((),) else None


def _answers(release: Release, module: str, qualname: str) -> bool:
    """Whether a class that does not define a method may have it from outside vLLM."""
    return bool(release.outside(module, qualname.rpartition(".")[0]))


def _against(use: Use, found: Shape, release: Release) -> str:
    if found.kind == "class" and not use.bound:
        made = release.constructor(found.module, found.qualname)
        return _all_fit(use, made) if made is not None else ""
    if found.kind not in METHODS:
        return ""
    in_class = "." in found.qualname
    drops = found.kind == "classmethod" or (found.kind == "function" and in_class and use.bound)
    taken = [one[1:] if drops else one for one in alternatives(found.signature)]
    assert use.arguments is not None
    said = [misfit(use.arguments, signature) for signature in taken]
    return said[0] if said and all(said) else ""


def _all_fit(use: Use, signatures: Sequence[Sequence[str]]) -> str:
    assert use.arguments is not None
    return next((said for one in signatures if (said := misfit(use.arguments, one))), "")


def judge_read(use: Use, before: Sequence[Release], new: Release) -> Verdict:
    """Whether the attributes that are read one after the other are there."""
    lost = _lost(use, new)
    if lost is None:
        return _SAME
    owner, name = lost
    if had := next((old for old in before if _had(use, old, name)), None):
        what = f"{owner.qualname} had {name!r} in {had.version} and has it no more"
        return Verdict("gone", what, f"{owner.module}:{owner.qualname}")
    if not use.guessed and owner.module.startswith(_CONFIGS):
        return Verdict("absent", f"{owner.qualname} has no {name!r}")
    return _SAME


def _had(use: Use, release: Release, name: str) -> bool:
    place = use.path.index(name)
    owner = _owner(use, release, upto=place)
    known = release.attributes(owner.module, owner.qualname) if owner is not None else None
    return known is not None and name in known


def _lost(use: Use, release: Release) -> tuple[Shape, str] | None:
    """The first attribute on the path that its class does not have, with the class."""
    for place, name in enumerate(use.path):
        owner = _owner(use, release, upto=place)
        if owner is None:
            return None
        known = release.attributes(owner.module, owner.qualname)
        if known is None or (name.startswith("__") and name.endswith("__")):
            return None
        if name not in known:
            return None if release.outside(owner.module, owner.qualname) else (owner, name)
    return None


def _owner(use: Use, release: Release, upto: int | None = None) -> Shape | None:
    """The class whose attribute the last name of a path is, or the one at a place of it."""
    found = release.shape(use.module, use.qualname)
    for name in use.path[: len(use.path) - 1 if upto is None else upto]:
        if found is None or found.kind != "class":
            return None
        found = release.config(found.module, found.qualname, name)
    return found if found is not None and found.kind == "class" else None


def lacking(use: Use, before: Sequence[Release], new: Release) -> tuple[list[str], bool]:
    """The abstract methods that a subclass does not define, and whether some release before did not ask for them."""
    if use.way != "subclass" or not use.concrete:
        return [], False
    left = [
        name
        for name in new.abstract(use.module, use.qualname) - use.own
        if not any(_defines(new, other, name) for other in use.owners)
    ]
    asking = [old.abstract(use.module, use.qualname) for old in before if old.shape(use.module, use.qualname)]
    fresh = sorted(name for name in left if not asking or any(name not in asked for asked in asking))
    if fresh:
        return fresh, True
    # Nobody could make an object of it before: a class without a constructor may hold functions for others.
    return (sorted(left), False) if "__init__" in use.own or use.made else ([], False)


def _defines(release: Release, cls: tuple[str, str], name: str) -> bool:
    module, qualname = cls
    found = release.shape(module, f"{qualname}.{name}")
    return found is not None and name not in release.abstract(module, qualname)


def vanished(use: Use, before: Sequence[Release], new: Release) -> Iterator[tuple[str, int, str]]:
    """Attributes that a body reads from ``self``, and that the class has no more: each with line and last release."""
    if use.body is None or "." not in use.qualname or use.mixed:
        return
    read = body_dependencies(use).attributes
    owner = use.qualname.rpartition(".")[0]
    has = new.attributes(use.module, owner) if read else None
    if has is None or has.issuperset(read):
        return
    outside = new.outside(use.module, owner)
    for name, line in read.items():
        if name not in has:
            had = (old for old in before if name in (old.attributes(use.module, owner) or ()))
            release = next((old for old in had if outside <= old.outside(use.module, owner)), None)
            if release is not None:
                yield name, line, release.version


def _unreachable(use: Use, before: Sequence[Release], new: Release) -> Literal["gone", "absent", ""]:
    """What became of a method that ``super()`` does not have; empty where it has it, or a base from outside may."""
    places = [(use.module, use.qualname), *use.owners]
    if any(new.shape(*place) is not None for place in places) or any(_answers(new, *place) for place in places):
        return ""
    classes = [new.shape(module, qualname.rpartition(".")[0]) for module, qualname in places]
    if any(shape is None or shape.kind != "class" for shape in classes):
        return ""
    if any(before[0].shape(*place) is not None for place in places):
        return "gone"
    magic = use.qualname.rpartition(".")[2].startswith("__")
    return "" if magic else "absent"


def refuses(use: Use, was: Shape | None, now: Shape) -> bool:
    """Whether the function that stands in the place of upstream's refuses calls that it did not have to take before."""
    before = _refused(use, was) if was is not None else frozenset()
    return bool(_refused(use, now) - before)


def uncallable(use: Use, before: Sequence[Release], new: Release) -> tuple[str, str]:
    """What an override does not take of what upstream passes, and how that is known.

    It is known by a call in vLLM, or by a release that the override fitted; else it takes none of the calls that
    upstream's signature allows, now or in the base. Empty where there is nothing to say.
    """
    was, now = (release.shape(use.module, use.qualname) for release in (before[0], new))
    if not _is_called_by_upstream(use) or now is None or now.opaque or now.kind not in METHODS:
        return "", ""
    refused = _refused(use, now)
    if not refused:
        return "", ""
    calls, all_known = _calls_of(use, now, new)
    for call in calls:
        if said := _call_refused(use, call):
            return said, f"vLLM calls it with {_passed(call)}"
    if (calls and all_known) or use.mixed or was is None or was.signature != now.signature:
        return "", ""
    for old in before[1:]:
        then = old.shape(use.module, use.qualname)
        if then is not None and then.kind == now.kind and not _refused(use, then):
            return "; ".join(sorted(refused)), f"it fitted {old.version}"
    return _all_reject(_own_parameters(use) or (), now), ""


def takes_every_call(use: Use, new: Release) -> bool:
    """Tell whether vLLM's own calls of an overridden method are in sight, and the override takes them all."""
    now = new.shape(use.module, use.qualname)
    if not _is_called_by_upstream(use) or now is None or now.opaque or now.kind not in METHODS:
        return False
    calls, all_known = _calls_of(use, now, new)
    return bool(calls) and all_known and not any(_call_refused(use, call) for call in calls)


def _is_called_by_upstream(use: Use) -> bool:
    name = use.qualname.rpartition(".")[2]
    if use.way != "override" or use.body is None or (name.startswith("__") and name != "__call__"):
        return False
    return _own_parameters(use) is not None and OPAQUE not in function_marks([use.body])


def _calls_of(use: Use, now: Shape, release: Release) -> tuple[list[Arguments], bool]:
    """Return the calls in a release that reach an override, and whether those on any object are among them.

    A call on ``self`` in a class that the override's derives from reaches it. A call on another object does where no
    class outside the family has a method of that name, or where the override takes none of the calls there are.
    """
    owner, _, method = use.qualname.rpartition(".")
    lineage = release.lineage(use.module, owner)
    family = set(lineage)
    definers = release.definers(method)
    above = family.intersection(definers)
    related = all(one in family or not above.isdisjoint(release.lineage(*one.split(":"))) for one in definers)
    taken = _taken(now)
    calls = [
        call for call in release.calls(method) if not all(misfit(call.arguments, signature) for signature in taken)
    ]
    reaching = [call.arguments for call in calls if (call.owner in family if call.owner else related)]
    if not reaching and all(_call_refused(use, call.arguments) for call in calls):
        return [call.arguments for call in calls], False
    return reaching, related


def _call_refused(use: Use, call: Arguments) -> str:
    return misfit(call, _own_parameters(use) or ())


def _passed(call: Arguments) -> str:
    by_place = f"{call.positional or 'no'} argument{'' if call.positional == 1 else 's'} by position"
    return " and ".join([by_place, ", ".join(f"{name}=" for name in call.keywords)]) if call.keywords else by_place


def _all_reject(own: Sequence[str], upstream: Shape) -> str:
    said = [rejects(own, one) for one in _taken(upstream)]
    return said[0] if said and all(said) else ""


def _refused(use: Use, upstream: Shape) -> frozenset[str]:
    """What a function of the package refuses of the calls that upstream's takes; of alternatives, the nearest."""
    own = _own_parameters(use) if use.body is not None else None
    if own is None:
        return frozenset()
    return min((refusals(own, one) for one in _taken(upstream)), key=len, default=frozenset())


def _taken(upstream: Shape) -> list[Sequence[str]]:
    """The parameters of upstream's function that callers give, of each of its alternatives."""
    bound = "." in upstream.qualname and upstream.kind != "staticmethod"
    return [one[1:] if bound else one for one in alternatives(upstream.signature)]


def _own_parameters(use: Use) -> list[str] | None:
    """What a function of the package takes, without the object and a patch's ``call``; None for wrapt's wrappers."""
    assert use.body is not None
    tokens = list(parameters(use.body.args))
    if [token.lstrip("/") for token in tokens[:2]] == ["wrapped", "instance"]:
        return None
    decorators = use.body.decorator_list if isinstance(use.body, Function) else []
    static = any(dotted(one) == "staticmethod" for one in decorators)
    bound = "." in use.qualname and not static and bool(tokens) and not tokens[0].startswith("*")
    return [token for token in tokens[bound:] if token != "call"]
