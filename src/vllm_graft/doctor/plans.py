"""The plan of vllm-graft in an environment, and its faults, as far as they show without importing an item.

What a start resolves, ``vllm_graft.plan`` resolves here too; only the classes of items are stand-ins made from sources.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.boot import SIMULATE_VARIABLE
from vllm_graft.errors import ConfigError
from vllm_graft.findings import Finding
from vllm_graft.plan.catalogue import ITEM_GROUP, SHIPPED, CatalogueEntry, load
from vllm_graft.plan.foreign_managers import GENERAL, GeneralPlugin, undecided
from vllm_graft.plan.layers import (
    CONFIG_VARIABLE,
    Choice,
    Layer,
    Options,
    find_file,
    from_additional_config,
    from_environment,
    read_file,
)
from vllm_graft.plan.resolution import (
    ALL,
    PlanRequest,
    check_option_owners,
    foreign,
    layers_of,
    merge_names,
    merge_options,
    plan_items,
)
from vllm_graft.points import PATCHES_VARIABLE, POINTS, Point, custom_patches, keys
from vllm_graft.sources.finder import find_certain
from vllm_graft.sources.modules import SourceModule, read_module
from vllm_graft.switches import disabled, is_set

if TYPE_CHECKING:
    from vllm_graft.contracts.item import OptionValue
    from vllm_graft.doctor.environment import EntryPoint, Environment

_CONTRACTS = {contract.rpartition(":")[2]: contract for point in POINTS if point.key for contract in point.contracts}


def simulated(env: Environment) -> bool:
    """Return whether the simulated accelerator would be there."""
    return is_set(SIMULATE_VARIABLE, env.variables) and not disabled(env.variables)


def configured(env: Environment) -> str:
    """Return the file, variable or argument that gives vllm-graft something to do; empty if none does."""
    if disabled(env.variables):
        return ""
    try:
        file = find_file(env.variables)
    except ConfigError:
        return CONFIG_VARIABLE
    if file is not None:
        return str(file)
    if custom_patches(env.variables):
        return PATCHES_VARIABLE
    if "graft" in env.arguments.document("--additional-config"):
        return "--additional-config"
    return SIMULATE_VARIABLE if simulated(env) else ""


def problems(env: Environment) -> list[ConfigError]:
    """Return every fault of the configuration: for the model in the arguments, else for all profiles."""
    try:
        weak, strong = _layers(env)
    except ConfigError as error:
        return [error]
    faults: list[ConfigError] = []
    options = merge_options([*weak, *strong])
    for key, named in _chosen(weak, strong):
        known = _known(env, keys()[key], options)
        if key == "patches" and foreign(named, known) and _general_plugins(env):
            continue
        try:
            plan_items(key, [named], known, options)
        except ConfigError as error:
            faults.append(error if error.where else ConfigError(error.what, where=named.origin, fix=error.fix))
    for item, given in options.items():
        try:
            check_option_owners({item: given}, _known(env, POINTS[0], options))
        except ConfigError as error:
            faults.append(error)
    return list({str(error): error for error in faults}.values())


def undecided_patches(env: Environment) -> list[Finding]:
    """Return a finding for each name in ``VLLM_CUSTOM_PATCHES`` that only a general plugin could register."""
    layer, plugins = from_environment(env.variables), _general_plugins(env)
    if layer is None or not plugins:
        return []
    known = _known(env, POINTS[0], {})
    return [undecided(named.value, plugins) for named in layer.names["patches"] if foreign(named, known)]


def _general_plugins(env: Environment) -> list[GeneralPlugin]:
    entries = [entry for entry in env.in_group(GENERAL) if env.loads(entry)]
    found = [GeneralPlugin(entry.name, entry.package, entry.module) for entry in entries]
    return [plugin for plugin in found if plugin.registers_patches]


def planned(env: Environment) -> dict[str, set[str]]:
    """Return the names under each key of the plan, ``*`` included, of all models; none if the plan is at fault."""
    found: dict[str, set[str]] = {}
    for key, named in _chosen_by(env):
        found.setdefault(key, set()).add(named.value)
    return found


def patches(env: Environment) -> list[dict[str, str]]:
    """Return the patches that the plan names and a package offers: name, class, package, and what names each."""
    found: dict[str, dict[str, str]] = {}
    known = _known(env, keys()["patches"], {})
    for named in [named for key, named in _chosen_by(env) if key == "patches"]:
        try:
            items = plan_items("patches", [named], known, {})
        except ConfigError:
            continue
        for item in items:
            row = {"name": item.name, "target": item.target, "package": item.package, "origin": item.origin}
            found.setdefault(item.name, row)
    return list(found.values())


def _chosen_by(env: Environment) -> list[tuple[str, Choice]]:
    """Return the names that count in a plan that is on and without fault; D027 has said what is wrong with others."""
    try:
        return [] if disabled(env.variables) else _chosen(*_layers(env))
    except ConfigError:
        return []


def together(env: Environment) -> bool:
    """Return whether one server has all planned patches, rather than those of one profile or another."""
    try:
        weak, strong = _layers(env)
    except ConfigError:
        return False
    replaced = any("patches" in layer.names for layer in strong)
    return bool(replaced or env.arguments.model) or not any("patches" in layer.names for layer in weak[1:])


def strict(env: Environment) -> bool:
    """Return whether a patch that cannot be applied stops a start; if profiles differ, the strictest counts."""
    try:
        weak, strong = _layers(env)
    except ConfigError:
        return True
    # A model decides which profiles match; then the last layer that says something wins.
    layers = [*weak, *strong] if env.arguments.model else strong
    set_to = [layer.settings["on_failure"][0] for layer in layers if "on_failure" in layer.settings]
    if set_to or env.arguments.model:
        return not set_to or set_to[-1] != "warn"
    return any(layer.settings.get("on_failure", ("stop", ""))[0] != "warn" for layer in weak or [Layer("")])


def loads(env: Environment, entry: EntryPoint) -> bool:
    """Return whether a server would load an entry point; one of ours if the plan names it or ``*``."""
    if entry.group != ITEM_GROUP:
        return env.uses(entry)
    return any({entry.name, ALL} & given for given in planned(env).values())


def _layers(env: Environment) -> tuple[list[Layer], list[Layer]]:
    """Return the layers of the file, and those that override it.

    Without a model's name every profile may match; with ``--config`` that file may name the model, and none does.
    """
    path = find_file(env.variables)
    file = read_file(path) if path is not None else None
    text = env.arguments.value("--additional-config")
    try:
        given = json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where="--additional-config", fix="quote it as one word") from error
    strong = [layer for layer in (from_environment(env.variables), from_additional_config(given)) if layer is not None]
    model = env.arguments.model
    if file is None:
        return [], strong
    if not model:
        return [file.defaults, *([] if env.arguments.given("--config") else file.profiles)], strong
    return layers_of(file, PlanRequest(model, tuple(env.arguments.values("--served-model-name")))), strong


def _chosen(weak: list[Layer], strong: list[Layer]) -> list[tuple[str, Choice]]:
    """Return every name that counts, with its key: those of all profiles, unless a stronger layer has the key."""
    replaced = {key for layer in strong for key in layer.names}
    layers = [
        (key, name) for layer in weak for key, given in layer.names.items() if key not in replaced for name in given
    ]
    return [*layers, *((key, name) for key, given in merge_names(strong).items() for name in given)]


def _known(env: Environment, point: Point, options: Options) -> dict[str, CatalogueEntry]:
    offered = {name: (target, "vllm-graft") for name, target in SHIPPED.items()}
    offered.update({entry.name: (entry.value, entry.package) for entry in env.in_group(ITEM_GROUP)})
    given = {name: {option: value for option, (value, _) in options.get(name, {}).items()} for name in offered}
    return {
        # Our own are those of this interpreter, whatever path is examined.
        name: _ReadItem(name, target, package, point, tuple(sys.path) if name in SHIPPED else env.path, given[name])
        for name, (target, package) in offered.items()
    }


@dataclass(frozen=True, slots=True)
class _ReadItem(CatalogueEntry):
    """An item whose class is not imported: a stand-in has the contract and options that its source states."""

    point: Point
    path: tuple[str, ...]
    given: Mapping[str, OptionValue]

    def load(self) -> type:
        """Make a class of the same contract and options; what cannot be read is taken to be right."""
        bases, options = self._declared()
        contract = next((_CONTRACTS[base] for base in bases if base in _CONTRACTS), self.point.contracts[0])
        kind = load(contract, self.name, "vllm-graft")
        if not hasattr(kind, "options"):
            return kind
        # The keys of a sampler are not read, so those that the plan gives to requests are believed to be its own.
        defaults = self.given.get("defaults")
        keys = {"keys": tuple(defaults)} if isinstance(defaults, Mapping) else {}
        return type(kind.__name__, (kind,), keys if options is None else {**keys, "options": options})

    def _declared(self) -> tuple[list[str], Mapping[str, OptionValue] | None]:
        """Return the contracts among the class's bases, and its options; None if it declares none itself."""
        name, _, attribute = self.target.partition(":")
        module = read_module(name, self.path)
        found = find_certain(module, attribute, self.path) if isinstance(module, SourceModule) else None
        if found is None:
            return [], self.given
        holder, kind = found
        if not isinstance(kind, ast.ClassDef):
            return [], self.given
        bases = []
        for base in kind.bases:
            # A base counts if it is imported from vllm-graft and is a contract.
            node = base.value if isinstance(base, ast.Subscript) else base
            bound = holder.namespace.only(node.id) if isinstance(node, ast.Name) else None
            if isinstance(bound, ast.ImportFrom) and (bound.module or "").startswith("vllm_graft"):
                names = {alias.asname or alias.name: alias.name for alias in bound.names}
                contract = names[node.id] if isinstance(node, ast.Name) else ""
                bases += [contract] if contract in _CONTRACTS else []
        for statement in kind.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "options" for target in targets):
                try:
                    value = ast.literal_eval(getattr(statement, "value", None) or "")
                except (ValueError, TypeError, SyntaxError):
                    value = None
                return bases, value if isinstance(value, dict) else self.given
        return bases, None if len(bases) == len(kind.bases) else self.given
