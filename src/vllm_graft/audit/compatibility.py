"""Check code against a release: arguments that do not fit, attributes and methods that are missing.

Signatures are written as ``sources.fingerprint.signature`` does, without the kind of definition and without a
parameter that is already bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_graft.audit.model import Arguments, Use, Verdict
from vllm_graft.audit.releases.outline import OPAQUE, function_marks
from vllm_graft.audit.releases.release import METHODS, Release, Shape, Signature, alternatives
from vllm_graft.audit.uses import body_dependencies
from vllm_graft.sources.fingerprint import Function, parameters, parse_parameter
from vllm_graft.sources.scopes import dotted

_SAME: Final = Verdict("same")


_PYDANTIC: Final = frozenset({"BaseModel"})
# The methods of a pydantic model besides its fields and names that begin with ``model_``.
_MODEL_METHODS: Final = frozenset(
    {"construct", "copy", "dict", "from_orm", "json", "parse_file", "parse_obj", "parse_raw", "schema", "schema_json",
     "update_forward_refs", "validate"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    place: bool
    keyword: bool
    rest: str
    optional: bool

    @classmethod
    def parse(cls, token: str) -> _Parameter:
        one = parse_parameter(token)
        by_place, by_keyword = one.prefix in ("", "/"), one.prefix in ("", "kw ")
        return cls(one.name, by_place, by_keyword, one.rest, bool(one.rest) or one.has_default)


def explain_misfit(arguments: Arguments, signature: Sequence[str]) -> str:
    """Explain why a call does not fit a signature, as Python would; empty if it fits or only running would show."""
    taken = [_Parameter.parse(token) for token in signature]
    places = [one for one in taken if one.place]
    by_place = [one.name for one in places[: arguments.positional]]
    names = {one.name for one in taken if one.keyword}
    rest = {one.rest for one in taken}
    said: list[str] = []
    if arguments.positional > len(places) and "*" not in rest:
        count = f"{len(places) or 'no'} argument{'' if len(places) == 1 else 's'}"
        given = f"{arguments.positional} {'is' if arguments.positional == 1 else 'are'} given"
        said.append(f"it takes {count} by position, {given}")
    unknown = [name for name in arguments.keywords if name not in names]
    if unknown and "**" not in rest:
        said.append(f"it takes no {_listed(unknown)}")
    if twice := [name for name in arguments.keywords if name in by_place and name in names]:
        said.append(f"{_listed(twice)} is given by position and by keyword")
    filled = {*(name for name in arguments.keywords if name in names), *by_place}
    missing = [one for one in taken if not one.optional and one.name not in filled]
    if arguments.unpacks:
        missing = [one for one in missing if not one.place]
    if missing and not arguments.unpacks_keywords:
        said.append(f"it needs {_listed([one.name for one in missing])}")
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def unsupported_calls(own: Sequence[str], upstream: Sequence[str]) -> frozenset[str]:
    """Describe the calls that upstream's signature allows and a function refuses; empty if it takes them all."""
    mine, theirs = ([_Parameter.parse(token) for token in each] for each in (own, upstream))
    rest = {one.rest for one in mine}
    places = [one.name for one in mine if one.place]
    names = {one.name for one in mine if one.keyword}
    given = {one.name for one in theirs if not one.rest}
    said: list[str] = []
    for place, one in enumerate(parameter for parameter in theirs if parameter.place):
        if one.keyword and one.name not in names and "**" not in rest:
            said.append(f"it does not take {one.name!r}")
        elif place >= len(places) and "*" not in rest and not (one.keyword and "**" in rest):
            said.append(f"it does not take {one.name!r} by position")
        elif one.name in places and places.index(one.name) != place:
            said.append(f"it takes {one.name!r} at another place")
    for one in theirs:
        if not one.rest and not one.place and one.name not in names and "**" not in rest:
            said.append(f"it does not take {one.name!r}")
    if not any(one.rest == "**" for one in theirs):
        said += [f"it needs {one.name!r}" for one in mine if not one.optional and one.name not in given]
    return frozenset(said)


def explain_total_misfit(own: Sequence[str], upstream: Sequence[str]) -> str:
    """Explain why no call that upstream's signature allows fits a function; empty if some do.

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
        named = tuple(one.name for one in places if one.keyword)
        said.append(explain_misfit(Arguments(len(places), names), own))
        said.append(explain_misfit(Arguments(len(only), (*named, *names)), own))
    return said[0] if all(said) else ""


def judge_call(use: Use, before: Sequence[Release], new: Release) -> Verdict:
    """Judge whether a call fits; a missing target is reported where it is named, unless by ``super()``."""
    base, places = before[0], [(use.module, use.qualname), *use.owners]
    # Of several classes that an import in a ``try`` may leave as the base, those that the release has.
    there = [place for place in places if new.shape(place[0], place[1].rpartition(".")[0]) is not None]
    places = there if use.via_super and there else places
    if use.via_super and all(new.shape(*place) is None for place in places):
        # ``super()`` lacks the method; a base from outside vLLM may have it.
        owners = [(module, qualname.rpartition(".")[0]) for module, qualname in places]
        classes = [new.shape(*owner) for owner in owners if not new.outside(*owner)]
        if len(classes) == len(owners) and all(shape is not None and shape.kind == "class" for shape in classes):
            if any(base.shape(*place) is not None for place in places):
                return Verdict("gone")
            if not use.attribute.startswith("__"):
                return Verdict("absent")
    why = _misfit_in_release(use, new)
    if why:
        if not _misfit_in_release(use, base):
            return Verdict("misfit", why)
        # What an attribute is declared to be, it may be a subclass of.
        return _SAME if use.guessed else Verdict("misfit", f"{why}; it did not fit {base.version} either")
    # An argument by position may reach another parameter than before. One that got a new name does not count: a
    # parameter has another place if its name, or the name that is in its place now, is in both signatures.
    count = use.arguments.positional if use.arguments is not None else 0
    was, now = (_by_position(use, release) if count else [] for release in (base, new))
    for place, (old, after) in enumerate(zip(was[:count], now[:count], strict=False)):
        if old != after and (old in now or after in was):
            return Verdict("broken", f"argument {place + 1} was {old!r} and is now {after!r}")
    return _SAME


def _by_position(use: Use, release: Release) -> list[str]:
    """Return the names of the parameters that a call fills by position; empty if they are not certain."""
    module, qualname = next(iter(_places(use, release)), ("", ""))
    found = release.shape(module, qualname) if module else None
    taken = _signatures(use, found, release) if found is not None and not found.opaque else []
    if found is not None and found.kind == "class":
        taken = taken[-1:]
    parsed = [_Parameter.parse(token) for token in taken[0]] if len(taken) == 1 else []
    return [one.name for one in parsed if one.place]


def _signatures(use: Use, found: Shape, release: Release) -> list[Signature]:
    """Return what a call has to fit: all signatures of a constructor, one of a function's alternatives."""
    if found.kind == "class" and not use.bound:
        return list(release.constructor(found.module, found.qualname) or ())
    if found.kind not in METHODS:
        return []
    drops = found.kind == "classmethod" or (found.kind == "function" and "." in found.qualname and use.bound)
    return [one[1:] if drops else one for one in alternatives(found.signature)]


def _places(use: Use, release: Release) -> list[tuple[str, str]]:
    """Return where a release may have what a call reaches, in the order of Python's lookup."""
    if use.path:
        owner = _owner(use, release, len(use.path) - 1)
        return [(owner.module, f"{owner.qualname}.{use.path[-1]}")] if owner is not None else []
    return [(use.module, use.qualname), *use.owners]


def _misfit_in_release(use: Use, release: Release) -> str:
    """Explain why a call does not fit a release; empty if it fits or cannot be determined statically."""
    for module, qualname in _places(use, release) if use.arguments is not None else ():
        assert use.arguments is not None
        found = release.shape(module, qualname)
        if found is not None:
            taken = [] if found.opaque else _signatures(use, found, release)
            reasons = [explain_misfit(use.arguments, signature) for signature in taken]
            if found.kind == "class":
                return next(filter(None, reasons), "")
            return reasons[0] if reasons and all(reasons) else ""
        if use.bound and qualname.endswith(".__init__"):
            # ``super().__init__`` reaches the constructor that a decorator generates, if there is no other.
            made = release.constructor(module, qualname.removesuffix(".__init__"))
            if made is not None and made != ((),):
                return explain_misfit(use.arguments, made[-1])
        if use.bound and release.outside(module, qualname.rpartition(".")[0]):
            return ""
    return ""


def judge_read(use: Use, before: Sequence[Release], new: Release) -> Verdict:
    """Judge whether the attributes that are read one after the other exist."""

    def find(release: Release, place: int) -> tuple[Shape | None, frozenset[str] | None]:
        """Return the class whose attribute is read, and what it has."""
        owner = _owner(use, release, place)
        return owner, release.attributes(owner.module, owner.qualname) if owner is not None else None

    for place, name in enumerate(use.path):
        owner, known = find(new, place)
        if owner is None or known is None or (name.startswith("__") and name.endswith("__")):
            return _SAME
        if name in known:
            continue
        if name in use.own_attributes:
            # The package sets it itself.
            return _SAME
        outside = new.outside(owner.module, owner.qualname)
        if outside and (outside != _PYDANTIC or name.startswith("model_") or name in _MODEL_METHODS):
            return _SAME
        for old in before:
            if name in (find(old, use.path.index(name))[1] or ()):
                what = f"{owner.qualname} had {name!r} in {old.version} but no longer does"
                return Verdict("gone", what, f"{owner.module}:{owner.qualname}")
        if not use.guessed and owner.module.startswith("vllm.config"):
            # Other classes may get attributes at run time; vLLM's configurations declare theirs.
            return Verdict("absent", f"{owner.qualname} has no {name!r}")
        return _SAME
    return _SAME


def _owner(use: Use, release: Release, place: int) -> Shape | None:
    """Return the class whose attribute a name of the path is."""
    found = release.shape(use.module, use.qualname)
    for name in use.path[:place]:
        if found is None or found.kind != "class":
            return None
        found = release.config(found.module, found.qualname, name)
    return found if found is not None and found.kind == "class" else None


def missing_methods(use: Use, before: Sequence[Release], new: Release) -> tuple[list[str], bool]:
    """Return the abstract methods that a subclass lacks, and whether an older release did not require them."""
    if use.way != "subclass" or not use.instantiated:
        return [], False
    left = [
        name
        for name in new.abstract(use.module, use.qualname) - use.own_attributes
        if not any(
            new.shape(module, f"{qualname}.{name}") is not None and name not in new.abstract(module, qualname)
            for module, qualname in use.owners
        )
    ]
    required = [old.abstract(use.module, use.qualname) for old in before if old.shape(use.module, use.qualname)]
    fresh = sorted(name for name in left if not required or any(name not in names for names in required))
    if fresh:
        return fresh, True
    # The class could not be instantiated before either: without a constructor it may only hold functions for others.
    return (sorted(left), False) if "__init__" in use.own_attributes or use.constructed_here else ([], False)


def vanished_attributes(use: Use, before: Sequence[Release], new: Release) -> Iterator[tuple[str, int, str]]:
    """Yield the attributes that a body reads from ``self`` or calls on ``cls``, and that the class lost.

    Each with its position, and the release that had it.
    """
    if use.body is None or not use.container or use.has_other_bases:
        return
    read = body_dependencies(use).attributes
    owner = use.container
    has = new.attributes(use.module, owner) if read else None
    if has is None or has.issuperset(read):
        return
    outside = new.outside(use.module, owner)
    others = [(module, qualname.rpartition(".")[0]) for module, qualname in use.alternatives]
    for name, place in read.items():
        if any(name in (new.attributes(*one) or ()) or new.outside(*one) for one in others):
            continue
        if name not in has:
            had = (old for old in before if name in (old.attributes(use.module, owner) or ()))
            release = next((old for old in had if outside <= old.outside(use.module, owner)), None)
            if release is not None:
                yield name, place, release.version


def refuses_new_calls(use: Use, was: Shape | None, now: Shape) -> bool:
    """Return whether a replacement refuses calls that upstream's old signature did not allow."""
    before = _unsupported_by(use, was) if was is not None else frozenset()
    return bool(_unsupported_by(use, now) - before)


def find_unsupported_call(use: Use, before: Sequence[Release], new: Release) -> tuple[str, str]:
    """Describe a call by upstream that an override or a patch does not accept, and how that is known; empty for none.

    It is known by a call in vLLM, or by a release that the override fitted; else the override takes none of the calls
    that upstream's signature allows, now or in the base.
    """
    now = _overridden(use, new)
    refused = _unsupported_by(use, now) if now is not None else frozenset()
    if now is None or not refused:
        return "", ""
    own = _own_parameters(use) or ()
    calls, all_known = _calls_of(use, now, new)
    for call in calls:
        if said := explain_misfit(call, own):
            passed = [f"{call.positional or 'no'} argument{'' if call.positional == 1 else 's'} by position"]
            passed += [", ".join(f"{name}=" for name in call.keywords)] if call.keywords else []
            return said, f"vLLM calls it with {' and '.join(passed)}"
    was = before[0].shape(use.module, use.qualname)
    if (
        (calls and all_known)
        or use.has_other_bases
        or use.alternatives
        or was is None
        or was.signature != now.signature
    ):
        return "", ""
    for old in before[1:]:
        then = old.shape(use.module, use.qualname)
        if then is not None and then.kind == now.kind and not _unsupported_by(use, then):
            return "; ".join(sorted(refused)), f"it fitted {old.version}"
    reasons = [explain_total_misfit(own, one) for one in _taken(now)]
    return reasons[0] if reasons and all(reasons) else "", ""


def takes_every_call(use: Use, new: Release) -> bool:
    """Return whether vLLM's own calls of an overridden method are in sight, and the override takes them all."""
    now = _overridden(use, new) if use.way == "override" else None
    if now is None:
        return False
    calls, all_known = _calls_of(use, now, new)
    return bool(calls) and all_known and not any(explain_misfit(call, _own_parameters(use) or ()) for call in calls)


def _overridden(use: Use, release: Release) -> Shape | None:
    """Return the method that an override or a patch replaces, if upstream calls it and its parameters are certain."""
    if not (use.way == "override" or (use.as_written and use.container)):
        return None
    if use.body is None or (use.attribute.startswith("__") and use.attribute != "__call__"):
        return None
    if _own_parameters(use) is None or OPAQUE in function_marks([use.body]):
        return None
    found = release.shape(use.module, use.qualname)
    # A plain function in the place of a static method takes what it is called with on the class.
    kinds = METHODS if use.way == "override" else ("function",)
    return found if found is not None and not found.opaque and found.kind in kinds else None


def _calls_of(use: Use, now: Shape, release: Release) -> tuple[list[Arguments], bool]:
    """Return the calls in a release that reach an override, and whether those on any object are among them.

    A call on ``self`` in a class that the override's derives from reaches it. A call on another object does if no
    class outside the family has a method of that name, or if the override takes none of the calls there are.
    """
    family = set(release.lineage(use.module, use.container))
    definers = release.definers(use.attribute)
    above = family.intersection(definers)
    related = all(one in family or not above.isdisjoint(release.lineage(*one.split(":"))) for one in definers)
    taken = _taken(now)
    calls = [
        call for call in release.calls(use.attribute) if not all(explain_misfit(call.arguments, one) for one in taken)
    ]
    reaching = [call.arguments for call in calls if (call.owner in family if call.owner else related)]
    own = _own_parameters(use) or ()
    if not reaching and all(explain_misfit(call.arguments, own) for call in calls):
        return [call.arguments for call in calls], False
    return reaching, related


def _unsupported_by(use: Use, upstream: Shape) -> frozenset[str]:
    """Describe what the package's function refuses of the calls that upstream's takes; of alternatives, the nearest."""
    own = _own_parameters(use) if use.body is not None else None
    if own is None:
        return frozenset()
    return min((unsupported_calls(own, one) for one in _taken(upstream)), key=len, default=frozenset())


def _taken(upstream: Shape) -> list[Sequence[str]]:
    """Return the parameters of upstream's function that callers pass, of each of its alternatives."""
    bound = "." in upstream.qualname and upstream.kind != "staticmethod"
    return [one[1:] if bound else one for one in alternatives(upstream.signature)]


def _own_parameters(use: Use) -> list[str] | None:
    """Return the package's parameters without the object and a patch's ``call``; None for wrapt's wrappers."""
    assert use.body is not None
    tokens = list(parameters(use.body.args))
    if [token.lstrip("/") for token in tokens[:2]] == ["wrapped", "instance"]:
        return None
    decorators = use.body.decorator_list if isinstance(use.body, Function) else []
    static = any(dotted(one) == "staticmethod" for one in decorators)
    bound = "." in use.qualname and not static and bool(tokens) and not tokens[0].startswith("*")
    return [token for token in tokens[bound:] if token != "call"]
