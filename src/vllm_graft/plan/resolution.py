"""From the layers to a plan: which profiles match, which names win, what the names stand for."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_graft import points
from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.validation import find_mistake, shared_key, source_location
from vllm_graft.errors import ConfigError, GraftError, OptionError, nearest
from vllm_graft.findings import Finding
from vllm_graft.plan.catalogue import Registered, catalogue, load
from vllm_graft.plan.layers import (
    CONFIG_VARIABLE,
    FILE,
    File,
    Layer,
    Named,
    Setting,
    find_file,
    from_additional_config,
    from_environment,
    read_file,
)
from vllm_graft.plan.managers import general_plugins, manager_of, undecided
from vllm_graft.plan.plan import OnFailure, Plan, PlanItem, UnknownKeys
from vllm_graft.points import PATCHES_VARIABLE

ALL = "*"


@dataclass(frozen=True, slots=True)
class Request:
    """What a start says of itself before the plan is known: the model as given, its served names, the arguments.

    ``plugins_loaded`` says that vLLM has called all general plugins in this process, and they have registered what they
    have.
    """

    model: str
    served: tuple[str, ...] = ()
    additional_config: object = None
    plugins_loaded: bool = False


def resolve(request: Request) -> Plan:
    """The plan for one model; a ConfigError with place and next step where the configuration is at fault."""
    path = find_file()
    file = read_file(path) if path is not None else None
    layers = [
        *(layers_of(file, request) if file is not None else []),
        *(layer for layer in (from_environment(), from_additional_config(request.additional_config)) if layer),
    ]
    names = merge_names(layers)
    options = merge_options(layers)
    settings = _merge_settings(layers)
    callers = _callers(settings)
    if not any(names.values()) and not options and not callers:
        return Plan(model=request.model, findings=tuple(_why_nothing(file, request)))
    known = catalogue()
    findings = _leave_to_others(names, known, plugins_loaded=request.plugins_loaded)
    items = [item for key, chosen in names.items() for item in items_of(key, chosen, known, options)]
    left_out = _of_other_models(items, model_names(request.model, request.served))
    check_option_owners(options, known)
    for item in items:
        _refuse_mistakes(item)
    _refuse_shared_keys(items)
    if not items and not callers and not findings:
        findings = _why_nothing(file, request)
    on_failure, endpoint = settings.get("on_failure", ("stop", "")), settings.get("endpoint", (True, ""))
    return Plan(
        items=tuple(item for item in items if item.name not in left_out),
        on_failure=_as_on_failure(on_failure[0]),
        endpoint=bool(endpoint[0]),
        model=request.model,
        origins={key: origin for key, (_, origin) in settings.items()},
        left_out=left_out,
        callers=callers,
        findings=tuple(findings),
        unknown_keys=_as_unknown_keys(settings.get("unknown_keys", ("", ""))[0]),
        other_keys=_as_names(settings.get("other_keys", ((), ""))[0]),
    )


def nothing_configured() -> Finding:
    """Say that nothing asks for anything, and where it was looked for."""
    others = f"{CONFIG_VARIABLE}, {PATCHES_VARIABLE} and --additional-config"
    what = f"is empty: there is no {FILE} in {Path.cwd()}, and none of {others} names anything"
    fix = f"write a {FILE} there, or set {CONFIG_VARIABLE} to the file"
    return Finding("P004", "info", "plan", what, "", fix)


def _why_nothing(file: File | None, request: Request) -> list[Finding]:
    """Say why a file that is there names nothing for this model; nothing where there is no file."""
    if file is None:
        return []
    emptied = from_environment()
    if emptied is not None and not emptied.names["patches"]:
        taken = [named.value for layer in layers_of(file, request) for named in layer.names.get("patches", [])]
        if taken:
            names = ", ".join(dict.fromkeys(taken))
            what = f"is empty: {PATCHES_VARIABLE} is set and empty, which takes out the patches of {file.path}: {names}"
            return [Finding("P004", "info", "plan", what, PATCHES_VARIABLE, f"unset {PATCHES_VARIABLE} to have them")]
    tried = model_names(request.model, request.served)
    unmatched = [profile for profile in file.profiles if profile.names and not matches(profile.models, tried)]
    if unmatched:
        globs = "; ".join(f"{', '.join(each.models)} at {each.origin.split()[-1]}" for each in unmatched)
        what = f"is empty: [defaults] names nothing, and {', '.join(tried)} matches no profile that does ({globs})"
        fix = "correct the profile's `model`, or serve the model under a name that it matches (--served-model-name)"
        return [Finding("P004", "info", "plan", what, str(file.path), fix)]
    what = f"is empty: {file.path} names no item"
    fix = "name one under [defaults] or in a [[profile]]; `vllm-graft items` lists them"
    return [Finding("P004", "info", "plan", what, str(file.path), fix)]


def _leave_to_others(
    names: dict[str, list[Named]], known: Mapping[str, Registered], *, plugins_loaded: bool
) -> list[Finding]:
    """Take out of the patches those that a general plugin of another package registers, and say so of each."""
    chosen = names.get("patches", [])
    unknown = [each for each in chosen if foreign(each, known)]
    plugins = general_plugins() if unknown else []
    found: dict[str, Finding] = {}
    for each in unknown:
        if not plugins_loaded and plugins:
            found[each.value] = undecided(each.value, plugins)
        elif plugins_loaded and (manager := manager_of(each.value, plugins)):
            found[each.value] = manager.finding(each.value)
    if found:
        names["patches"] = [each for each in chosen if each not in unknown or each.value not in found]
    return list(found.values())


def foreign(named: Named, known: Mapping[str, Registered]) -> bool:
    """Whether a name may be one of another package's manager: nobody offers it, and only the variable names it."""
    return named.origin == PATCHES_VARIABLE and named.value != ALL and named.value not in known


def _refuse_mistakes(item: PlanItem) -> None:
    """Refuse a class that cannot work."""
    kind = load(item.target, item.name, item.package)
    mistake = find_mistake(kind, item.options)
    if mistake is not None:
        raise ConfigError(
            f"the {item.point} {item.name!r} ({item.target} of {item.package}) {mistake.what}",
            where=source_location(kind),
            fix=f"{mistake.fix}; or take {item.name!r} out of the plan ({item.origin})",
        )


def _refuse_shared_keys(items: Iterable[PlanItem]) -> None:
    """Refuse two samplers with one key: a request could not say which of them it means."""
    planned = {item.name: item for item in items if item.point == "sampler"}
    keys = {name: load(item.target, name, item.package).request_keys() for name, item in planned.items()}  # type: ignore[attr-defined]
    if shared := shared_key(keys):
        key, first, second = shared
        raise ConfigError(
            f"the samplers {first!r} ({planned[first].target}) and {second!r} ({planned[second].target}) both take the "
            f"key {key!r}, so a request could not say which of them it means",
            where=planned[second].origin,
            fix="take one of the two out of the plan, or rename the key in its class",
        )


def _of_other_models(items: Iterable[PlanItem], names: Iterable[str]) -> dict[str, str]:
    """The patches that say themselves which models they are for, and this is none of them; each with the reason."""
    names = list(names)
    globs = {item.name: _models_of(item) for item in items if item.point == "patch"}
    return {
        name: f"is for the models {', '.join(wanted)}, and this is {names[0]}"
        for name, wanted in globs.items()
        if wanted and not matches(wanted, names)
    }


def _models_of(item: PlanItem) -> tuple[str, ...]:
    declaration = getattr(load(item.target, item.name, item.package), "declaration", None)
    return declaration.models if declaration is not None else ()


def model_names(model: str, served: Iterable[str] = ()) -> list[str]:
    """Every name a profile's glob is tried on: as given, the repository behind a cache path, the path, served names."""
    names = [model, *served]
    if cached := re.search(r"models--([^/]+?)--([^/]+)", model):
        names.append(f"{cached[1]}/{cached[2]}")
    if os.path.exists(model):
        names.append(os.path.abspath(model))
    return list(dict.fromkeys(names))


def matches(globs: Iterable[str], names: Iterable[str]) -> bool:
    """Whether any glob matches any name; upper and lower case are the same, as on model hubs."""
    lowered = [name.lower() for name in names]
    return any(fnmatchcase(name, glob.lower()) for glob in globs for name in lowered)


def layers_of(file: File, request: Request) -> list[Layer]:
    """What a file says for one model, the strongest last; a ConfigError where two profiles contradict one another."""
    names = model_names(request.model, request.served)
    matching = [profile for profile in file.profiles if matches(profile.models, names)]
    _refuse_contradictions(matching)
    return [file.defaults, _with_defaults(file.defaults, matching)] if matching else [file.defaults]


def _with_defaults(defaults: Layer, profiles: list[Layer]) -> Layer:
    """One layer of all matching profiles: lists add to the defaults, single values replace them."""
    merged = Layer("profiles")
    for profile in profiles:
        for key, chosen in profile.names.items():
            if points.keys()[key].many:
                merged.names.setdefault(key, list(defaults.names.get(key, []))).extend(chosen)
            else:
                merged.names[key] = chosen
        merged.settings.update(profile.settings)
        for item, options in profile.options.items():
            merged.options.setdefault(item, {}).update(options)
    return merged


def _refuse_contradictions(profiles: list[Layer]) -> None:
    seen: dict[str, Named] = {}
    for profile in profiles:
        single = {key: chosen[0] for key, chosen in profile.names.items() if not points.keys()[key].many}
        settings = {key: Named(str(value), origin) for key, (value, origin) in profile.settings.items()}
        options = {
            f"options.{item}.{name}": Named(str(value), origin)
            for item, given in profile.options.items()
            for name, (value, origin) in given.items()
        }
        for key, named in {**single, **settings, **options}.items():
            first = seen.setdefault(key, named)
            if first.value != named.value:
                raise ConfigError(
                    f"two profiles match this model and disagree on `{key}`: {first.value!r} at {first.origin} "
                    f"and {named.value!r} at {named.origin}",
                    where=named.origin,
                    fix="make their `model` globs exclude one another, or set the key in one of them only",
                )


def merge_names(layers: list[Layer]) -> dict[str, list[Named]]:
    """The names under each key that count, by the last layer that has the key."""
    merged: dict[str, list[Named]] = {}
    for layer in layers:
        merged.update(layer.names)
    return {key: merged[key] for key in points.keys() if key in merged}


def _merge_settings(layers: list[Layer]) -> dict[str, tuple[Setting, str]]:
    merged: dict[str, tuple[Setting, str]] = {}
    for layer in layers:
        merged.update(layer.settings)
    return merged


def merge_options(layers: list[Layer]) -> dict[str, dict[str, tuple[OptionValue, str]]]:
    """The options of each item, the last layer's before the others'."""
    merged: dict[str, dict[str, tuple[OptionValue, str]]] = {}
    for layer in layers:
        for item, options in layer.options.items():
            merged.setdefault(item, {}).update(options)
    return merged


def items_of(
    key: str,
    chosen: list[Named],
    known: Mapping[str, Registered],
    options: Mapping[str, Mapping[str, tuple[OptionValue, str]]],
) -> list[PlanItem]:
    """What the names under a key stand for; a ConfigError at the first that is at fault."""
    point = points.keys()[key]
    items: dict[str, PlanItem] = {}
    for named in _expand(chosen, point, known):
        if named.value not in items:
            items[named.value] = _item(named, point, known, options.get(named.value, {}))
    return list(items.values())


def _expand(chosen: list[Named], point: points.Point, known: Mapping[str, Registered]) -> list[Named]:
    """The names with ``*`` spelled out: every registered item that fits the point."""
    spelled: list[Named] = []
    for named in chosen:
        _refuse_unbound(named, point)
        if named.value != ALL:
            spelled.append(named)
            continue
        fitting = [name for name, entry in known.items() if fits(entry.load(), point)] if point.many else []
        if not fitting:
            raise ConfigError(
                f"'*' names no {point.name}: " + ("none is registered" if point.many else "this key takes one name"),
                where=named.origin,
                fix=f"name the {point.name} you want, or take the line out",
            )
        spelled.extend(Named(name, named.origin) for name in fitting)
    return spelled


def _refuse_unbound(named: Named, point: points.Point) -> None:
    if not point.bound:
        raise ConfigError(
            f"{point.name} items cannot be planned: this version of vllm-graft does not bind that point yet",
            where=named.origin,
            fix=f"take {named.value!r} out of the plan; `vllm-graft points` shows what is bound",
        )


def _item(
    named: Named,
    point: points.Point,
    known: Mapping[str, Registered],
    given: Mapping[str, tuple[OptionValue, str]],
) -> PlanItem:
    entry = known.get(named.value)
    if entry is None:
        registers = ", and no general plugin registers it" if foreign(named, known) else ""
        raise ConfigError(
            f"there is no item {named.value!r}{nearest(named.value, known)}{registers}",
            where=named.origin,
            fix="correct the name, or install the package that offers it",
        )
    kind = entry.load()
    if not fits(kind, point):
        raise ConfigError(
            f"{named.value!r} ({entry.target} of {entry.package}) is not a {point.name}: it fulfils none of "
            f"{', '.join(point.contracts)}",
            where=named.origin,
            fix=f"name it under the key of its own point, or a {point.name} here",
        )
    values = _check_options(named.value, kind, given)
    declaration = getattr(kind, "declaration", None) if point.name == "patch" else None
    roles = point.roles if declaration is None else tuple(r for r in points.ROLES if r in declaration.processes)
    _validate(named, kind, values, given)
    return PlanItem(point.name, named.value, entry.target, entry.package, roles, values, named.origin)


def fits(kind: type, point: points.Point) -> bool:
    """Whether a class fulfils one of the contracts of a point."""
    return any(issubclass(kind, load(contract, point.name, "vllm-graft")) for contract in point.contracts)


def _check_options(name: str, kind: type, given: Mapping[str, tuple[OptionValue, str]]) -> dict[str, OptionValue]:
    declared = dict(kind.options) if issubclass(kind, Item) else {}
    for option, (value, origin) in given.items():
        if option not in declared:
            raise ConfigError(
                f"{name!r} has no option {option!r}{nearest(option, declared)}",
                where=origin,
                fix="correct the name or take the line out",
            )
        if not _same_type(value, declared[option]):
            raise ConfigError(
                f"the option {option!r} of {name!r} must be {_type_name(declared[option])}, and is {value!r}",
                where=origin,
                fix=f"give it a value like its default, {declared[option]!r}",
            )
    return {**declared, **{option: value for option, (value, _) in given.items()}}


def _validate(
    named: Named, kind: type, values: Mapping[str, OptionValue], given: Mapping[str, tuple[OptionValue, str]]
) -> None:
    """Have the item refuse what cannot work, and say where the value stands."""
    if not issubclass(kind, Item):
        return
    try:
        kind.check_options(values)
    except OptionError as error:
        origin = given[error.option][1] if error.option in given else named.origin
        what = f"the option {error.option!r} of {named.value!r} {error.what}"
        raise ConfigError(what, where=origin, fix=error.fix) from error
    except Exception as error:
        reason = str(error) if isinstance(error, GraftError | ValueError) else f"{type(error).__name__}: {error}"
        places = list(dict.fromkeys(origin for _, origin in given.values()))
        raise ConfigError(
            f"the options of {named.value!r} cannot be used: {reason}",
            where=", ".join(places) or named.origin,
            fix=f"correct them under [options.{named.value}]",
        ) from error


def _same_type(value: OptionValue, default: OptionValue) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    return isinstance(value, type(default))


def _type_name(default: OptionValue) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a table"}
    return words.get(type(default), "a list of strings")


def check_option_owners(
    options: Mapping[str, Mapping[str, tuple[OptionValue, str]]], known: Mapping[str, Registered]
) -> None:
    """Refuse options of an item that nobody offers."""
    for name, given in options.items():
        if name not in known:
            origin = next(iter(given.values()))[1] if given else ""
            raise ConfigError(
                f"options are given for {name!r}, and there is no such item{nearest(name, known)}",
                where=origin,
                fix="correct the name or take the table out",
            )


def _callers(settings: Mapping[str, tuple[Setting, str]]) -> str:
    """The file that says who may ask; a ConfigError where it is not there."""
    value, origin = settings.get("callers", ("", ""))
    path = str(value)
    if path and not os.path.exists(path):
        raise ConfigError(f"`callers` names {path}, and there is no such file", where=origin, fix="correct the name")
    return path


def _as_unknown_keys(value: object) -> UnknownKeys:
    return "refuse" if value == "refuse" else "pass" if value == "pass" else "refuse-similar"


def _as_names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def _as_on_failure(value: object) -> OnFailure:
    return "warn" if value == "warn" else "stop"
