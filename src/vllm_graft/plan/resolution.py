"""From the layers to a plan: match profiles, merge names and options, find the classes, validate."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from vllm_graft import points
from vllm_graft.contracts.attention import AttentionKernel
from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.validation import Mistake, find_mistake, find_option_mistake, shared_key, source_location
from vllm_graft.errors import ConfigError, GraftError, OptionError, describe_error, nearest
from vllm_graft.findings import Finding
from vllm_graft.plan.catalogue import CatalogueEntry, catalogue, load
from vllm_graft.plan.foreign_managers import general_plugins, manager_of, undecided
from vllm_graft.plan.layers import (
    CONFIG_VARIABLE,
    FILE,
    Choice,
    ConfigFile,
    Layer,
    Options,
    OptionValues,
    Setting,
    find_file,
    from_additional_config,
    from_environment,
    read_file,
)
from vllm_graft.plan.plan import Plan, PlanItem
from vllm_graft.points import PATCHES_VARIABLE

ALL = "*"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The subject of a plan: the model as given, its served names, and vLLM's ``additional_config``.

    ``plugins_loaded``: vLLM has called all general plugins in this process, so that they have registered their patches.
    """

    model: str
    served: tuple[str, ...] = ()
    additional_config: object = None
    plugins_loaded: bool = False


def resolve(request: PlanRequest) -> Plan:
    """Return the plan for one model; raise ConfigError with place and next step if the configuration is at fault."""
    path = find_file()
    file = read_file(path) if path is not None else None
    layers = [
        *(layers_of(file, request) if file is not None else []),
        *(layer for layer in (from_environment(), from_additional_config(request.additional_config)) if layer),
    ]
    names = merge_names(layers)
    options = merge_options(layers)
    settings = {key: setting for layer in layers for key, setting in layer.settings.items()}
    callers, origin = settings.get("callers", ("", ""))
    if callers and not os.path.exists(str(callers)):
        raise ConfigError(f"`callers` names {callers}, but there is no such file", where=origin, fix="correct the name")
    if not any(names.values()) and not options and not callers:
        return Plan(model=request.model, findings=tuple(_why_nothing(file, request)))
    known = catalogue()
    findings = _leave_to_others(names, known, plugins_loaded=request.plugins_loaded)
    items = [item for key, chosen in names.items() for item in plan_items(key, chosen, known, options, classes=True)]
    left_out = {}
    model = model_names(request.model, request.served)
    for item in items:
        kind = load(item.target, item.name, item.package) if item.point == "patch" else None
        declaration = getattr(kind, "declaration", None)
        if declaration is not None and declaration.models and not matches(declaration.models, model):
            left_out[item.name] = f"is for the models {', '.join(declaration.models)}, but this is {model[0]}"
    check_option_owners(options, known)
    if any(item.point == "patch" for item in items):
        # Refused here, and not with the first patch that has drifted.
        from vllm_graft.patching.review import stricter

        stricter("ignore")
    _refuse_shared_keys(items, *settings.get("other_keys", ((), "")))
    if not items and not callers and not findings:
        findings = _why_nothing(file, request)
    origins = {key: origin for key, (_, origin) in settings.items()}
    for item in items:
        given = options.get(item.name, {})
        origins |= {f"options.{item.name}.{option}": origin for option, (_, origin) in given.items()}
    return Plan(
        items=tuple(item for item in items if item.name not in left_out),
        model=request.model,
        origins=origins,
        left_out=left_out,
        findings=tuple(findings),
        # Validated with the layers; a setting that no layer has keeps the plan's default.
        **{key: value for key, (value, _) in settings.items()},  # type: ignore[arg-type]
    )


def nothing_configured() -> Finding:
    """Return the finding that nothing is configured; it names the places that were searched."""
    others = f"{CONFIG_VARIABLE}, {PATCHES_VARIABLE} and --additional-config"
    what = f"is empty: there is no {FILE} in {Path.cwd()}, and none of {others} names anything"
    fix = f"write a {FILE} there, or set {CONFIG_VARIABLE} to the file"
    return Finding("P004", "info", "plan", what, "", fix)


def _why_nothing(file: ConfigFile | None, request: PlanRequest) -> list[Finding]:
    """Return the finding about a file that names nothing for this model; nothing if there is no file."""
    if file is None:
        return []
    emptied = from_environment()
    if emptied is not None and not emptied.names["patches"]:
        taken = [named.value for layer in layers_of(file, request) for named in layer.names.get("patches", [])]
        if taken:
            names = ", ".join(dict.fromkeys(taken))
            what = f"is empty: {PATCHES_VARIABLE} is set but empty, which disables the patches in {file.path}: {names}"
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
    names: dict[str, list[Choice]], known: Mapping[str, CatalogueEntry], *, plugins_loaded: bool
) -> list[Finding]:
    """Take out of the patches those that a general plugin of another package registers; return a finding for each."""
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


def foreign(named: Choice, known: Mapping[str, CatalogueEntry]) -> bool:
    """Return whether another package's manager may know a name: it is not registered, and the variable has it."""
    return named.origin == PATCHES_VARIABLE and named.value != ALL and named.value not in known


def _find_empty_patch(kind: type) -> Mistake | None:
    """Return the mistake in a patch without a hook, which would be applied in every process and change nothing."""
    declaration = getattr(kind, "declaration", None)
    if declaration is None or declaration.hooks:
        return None
    return Mistake("changes nothing: it has no hook", "mark a method with @wrap, @replace or @add")


def _refuse_mistake(
    find: Callable[[], Mistake | None], point: points.Point, entry: CatalogueEntry, origin: str
) -> None:
    """Refuse a class that cannot work, or cannot even be examined."""
    try:
        mistake = find()
    except Exception as error:  # whatever a foreign class does when it is looked at
        mistake = Mistake(f"cannot be examined: {describe_error(error)}", "correct what the class declares")
    if mistake is not None:
        raise ConfigError(
            f"the {point.name} {entry.name!r} ({entry.target} of {entry.package}) {mistake.what}",
            where=source_location(entry.load()),
            fix=f"{mistake.fix}; or remove {entry.name!r} from the plan ({origin})",
        )


def _refuse_shared_keys(items: Iterable[PlanItem], others: Setting, origin: str) -> None:
    """Refuse two samplers with one key: a request could not say which it means. The same applies to ``other_keys``."""
    planned = {item.name: item for item in items if item.point == "sampler"}
    keys = {name: load(item.target, name, item.package).request_keys() for name, item in planned.items()}  # type: ignore[attr-defined]
    if shared := shared_key(keys):
        key, first, second = shared
        raise ConfigError(
            f"the samplers {first!r} ({planned[first].target}) and {second!r} ({planned[second].target}) both take the "
            f"key {key!r}, so a request could not say which of them it means",
            where=planned[second].origin,
            fix="remove one of the two from the plan, or rename the key in its class",
        )
    for name, own in keys.items():
        known = {known for key in own for known in (key.name, *key.aliases)}
        if both := sorted(known.intersection(others if isinstance(others, tuple) else ())):
            what = f"`other_keys` names {both[0]!r}, which is a key of the planned sampler {name!r}"
            raise ConfigError(what, where=origin, fix="remove it from `other_keys`, or the sampler from the plan")


def model_names(model: str, served: Iterable[str] = ()) -> list[str]:
    """Return the names that globs are matched with: as given, served, the repository of a cache path, the path."""
    names = [model, *served]
    # The folder of a model in the hub's cache: models--org--name/snapshots/<hash>.
    if cached := re.search(r"models--([^/]+?)--([^/]+)", model):
        names.append(f"{cached[1]}/{cached[2]}")
    if os.path.exists(model):
        # A relative path may be given; globs are usually written for absolute ones.
        names.append(os.path.abspath(model))
    return list(dict.fromkeys(names))


def matches(globs: Iterable[str], names: Iterable[str]) -> bool:
    """Return whether any glob matches any name; case does not matter, as on model hubs."""
    lowered = [name.lower() for name in names]
    return any(fnmatchcase(name, glob.lower()) for glob in globs for name in lowered)


def layers_of(file: ConfigFile, request: PlanRequest) -> list[Layer]:
    """Return a file's layers for one model, the strongest last; raise ConfigError if two profiles disagree."""
    names = model_names(request.model, request.served)
    matching = [profile for profile in file.profiles if matches(profile.models, names)]
    _refuse_contradictions(matching)
    # All matching profiles are one layer: their lists add to the defaults, their single values replace them.
    merged = Layer("profiles", options=merge_options(matching))
    for profile in matching:
        for key, chosen in profile.names.items():
            if points.keys()[key].is_list:
                merged.names.setdefault(key, list(file.defaults.names.get(key, []))).extend(chosen)
            else:
                merged.names[key] = chosen
        for key, (value, origin) in profile.settings.items():
            before = merged.settings.get(key) or file.defaults.settings.get(key)
            if isinstance(value, tuple) and before is not None and isinstance(before[0], tuple):
                value, origin = tuple(dict.fromkeys((*before[0], *value))), f"{before[1]}, {origin}"
            merged.settings[key] = (value, origin)
    return [file.defaults, merged] if matching else [file.defaults]


def _refuse_contradictions(profiles: list[Layer]) -> None:
    seen: dict[str, Choice] = {}
    for profile in profiles:
        single = {key: chosen[0] for key, chosen in profile.names.items() if not points.keys()[key].is_list}
        settings = {
            key: Choice(str(value), origin)
            for key, (value, origin) in profile.settings.items()
            if not isinstance(value, tuple)
        }
        options = {
            f"options.{item}.{name}": Choice(str(value), origin)
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


def merge_names(layers: list[Layer]) -> dict[str, list[Choice]]:
    """Return the names under each key, from the last layer that has the key."""
    merged = {key: names for layer in layers for key, names in layer.names.items()}
    return {key: merged[key] for key in points.keys() if key in merged}


def merge_options(layers: list[Layer]) -> Options:
    """Merge the options of each item; later layers win."""
    merged: Options = {}
    for layer in layers:
        for item, options in layer.options.items():
            merged.setdefault(item, {}).update(options)
    return merged


def plan_items(
    key: str, chosen: list[Choice], known: Mapping[str, CatalogueEntry], options: Options, *, classes: bool = False
) -> list[PlanItem]:
    """Return the items that the names under a key stand for; raise ConfigError at the first fault.

    ``classes`` has the classes checked too: the doctor's are made from sources alone, and have no methods.
    """
    point = points.keys()[key]
    spelled: list[Choice] = []
    for named in chosen:
        if not point.bound:
            what = f"{point.name} items cannot be planned: this version of vllm-graft does not bind that point yet"
            fix = f"remove {named.value!r} from the plan; `vllm-graft points` shows what is bound"
            raise ConfigError(what, where=named.origin, fix=fix)
        if named.value != ALL:
            spelled.append(named)
            continue
        # ``*`` stands for every registered item that fits the point.
        fitting = [name for name, entry in known.items() if fits(entry.load(), point)] if point.is_list else []
        if not fitting:
            why = "none is registered" if point.is_list else "this key takes one name"
            fix = f"name the {point.name} you want, or remove the line"
            raise ConfigError(f"'*' names no {point.name}: {why}", where=named.origin, fix=fix)
        spelled.extend(Choice(name, named.origin) for name in fitting)
    items: dict[str, PlanItem] = {}
    for named in spelled:
        if named.value not in items:
            items[named.value] = _item(named, point, known, options.get(named.value, {}), classes=classes)
    return list(items.values())


def _item(
    named: Choice, point: points.Point, known: Mapping[str, CatalogueEntry], given: OptionValues, *, classes: bool
) -> PlanItem:
    entry = known.get(named.value)
    if entry is None:
        registers = ", and no general plugin registers it" if foreign(named, known) else ""
        what = f"there is no item {named.value!r}{nearest(named.value, known)}{registers}"
        fix = "correct the name, or install the package that offers it"
        raise ConfigError(what, where=named.origin, fix=fix)
    kind = entry.load()
    if not fits(kind, point):
        what = f"{named.value!r} ({entry.target} of {entry.package}) is not an item of the {point.name} point: "
        what += "it implements none of "
        fix = "move it to the key of its own point, or name an item of this point here"
        raise ConfigError(what + ", ".join(point.contracts), where=named.origin, fix=fix)
    # In this order: what is compared with the options of a class, or called on it, has been checked before.
    if classes:
        _refuse_mistake(lambda: find_option_mistake(kind) or _find_empty_patch(kind), point, entry, named.origin)
    values = _check_options(named.value, kind, given)
    if classes:
        _refuse_mistake(lambda: find_mistake(kind, values), point, entry, named.origin)
    _validate(named, kind, values, given)
    # The other contract of its point frees blocks in engine core, where a kernel has no part.
    roles = ("worker",) if issubclass(kind, AttentionKernel) else point.roles
    declaration = getattr(kind, "declaration", None) if point.name == "patch" else None
    if declaration is not None:
        roles = tuple(role for role in points.ROLES if role in declaration.processes)
    return PlanItem(point.name, named.value, entry.target, entry.package, roles, values, named.origin)


def fits(kind: type, point: points.Point) -> bool:
    """Return whether a class implements one of the contracts of a point."""
    return any(issubclass(kind, load(contract, point.name, "vllm-graft")) for contract in point.contracts)


def _check_options(name: str, kind: type, given: OptionValues) -> dict[str, OptionValue]:
    declared = dict(kind.options) if issubclass(kind, Item) else {}
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "a table"}
    for option, (value, origin) in given.items():
        if option not in declared:
            what = f"{name!r} has no option {option!r}{nearest(option, declared)}"
            raise ConfigError(what, where=origin, fix="correct the name or remove the line")
        default = declared[option]
        if isinstance(default, bool) or isinstance(value, bool):
            fitting = isinstance(value, bool) and isinstance(default, bool)
        else:
            fitting = isinstance(value, (int, float) if isinstance(default, float) else type(default))
        if not fitting:
            wanted = words.get(type(default), "a list of strings")
            what = f"the option {option!r} of {name!r} must be {wanted}, but is {value!r}"
            raise ConfigError(what, where=origin, fix=f"give it a value like its default, {default!r}")
    return {**declared, **{option: value for option, (value, _) in given.items()}}


def _validate(named: Choice, kind: type, values: Mapping[str, OptionValue], given: OptionValues) -> None:
    """Call the item's own ``check_options``, and add the place of the value to its error."""
    if not issubclass(kind, Item):
        return
    try:
        # A copy: what the item writes into it must not become the plan's.
        kind.check_options(copy.deepcopy(dict(values)))
    except OptionError as error:
        origin = given[error.option][1] if error.option in given else named.origin
        what = f"the option {error.option!r} of {named.value!r} {error.what}"
        raise ConfigError(what, where=origin, fix=error.fix) from error
    except (Exception, SystemExit) as error:
        reason = describe_error(error)
        if isinstance(error, GraftError | ValueError):
            reason = reason.removeprefix(f"{type(error).__name__}: ")
        places = list(dict.fromkeys(origin for _, origin in given.values()))
        raise ConfigError(
            f"the options of {named.value!r} cannot be used: {reason}",
            where=", ".join(places) or named.origin,
            fix=f"correct them under [options.{named.value}]",
        ) from error


def check_option_owners(options: Options, known: Mapping[str, CatalogueEntry]) -> None:
    """Refuse options of an item that is not registered."""
    for name, given in options.items():
        if name not in known:
            origin = next(iter(given.values()))[1] if given else ""
            what = f"options are given for {name!r}, but there is no such item{nearest(name, known)}"
            raise ConfigError(what, where=origin, fix="correct the name or remove the table")
