"""What vllm-graft itself is asked to do, and what is wrong with it, as far as it shows without importing an item."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.boot import DISABLE_VARIABLE, SIMULATE_VARIABLE
from vllm_graft.doctor import modules
from vllm_graft.doctor.packages import OURS
from vllm_graft.errors import ConfigError
from vllm_graft.findings import Finding
from vllm_graft.plan.catalogue import SHIPPED, CatalogueEntry, load
from vllm_graft.plan.layers import (
    CONFIG_VARIABLE,
    Choice,
    Layer,
    find_file,
    from_additional_config,
    from_environment,
    read_file,
)
from vllm_graft.plan.managers import GENERAL, GeneralPlugin, undecided
from vllm_graft.plan.resolution import (
    ALL,
    PlanRequest,
    check_option_owners,
    foreign,
    items_of,
    layers_of,
    merge_names,
    merge_options,
)
from vllm_graft.points import PATCHES_VARIABLE, POINTS, Point, custom_patches, keys

if TYPE_CHECKING:
    from vllm_graft.contracts.item import OptionValue
    from vllm_graft.doctor.facts import Facts
    from vllm_graft.doctor.packages import Entry

_CONTRACTS = {contract.rpartition(":")[2]: contract for point in POINTS if point.key for contract in point.contracts}


def disabled(facts: Facts) -> bool:
    """Whether ``GRAFT_DISABLE`` turns vllm-graft off."""
    return _asked(facts, DISABLE_VARIABLE)


def simulated(facts: Facts) -> bool:
    """Whether the simulated accelerator is asked for, and would be there."""
    return _asked(facts, SIMULATE_VARIABLE) and not disabled(facts)


def configured(facts: Facts) -> str:
    """What asks vllm-graft to do something: a file, a variable or an argument; empty where nothing does."""
    if disabled(facts):
        return ""
    try:
        file = find_file(facts.environ)
    except ConfigError:
        return CONFIG_VARIABLE
    if file is not None:
        return str(file)
    if custom_patches(facts.environ):
        return PATCHES_VARIABLE
    if "graft" in facts.arguments.document("--additional-config"):
        return "--additional-config"
    return SIMULATE_VARIABLE if simulated(facts) else ""


def problems(facts: Facts) -> list[ConfigError]:
    """Every fault of the configuration; for the model that the arguments name, else for all profiles."""
    try:
        weak, strong = _layers(facts)
    except ConfigError as error:
        return [error]
    return list({str(error): error for error in _faults(facts, weak, strong)}.values())


def undecided_patches(facts: Facts) -> list[Finding]:
    """What is to be said of names in ``VLLM_CUSTOM_PATCHES`` that only a general plugin could register."""
    layer, plugins = from_environment(facts.environ), _general_plugins(facts)
    if layer is None or not plugins:
        return []
    known = _known(facts, POINTS[0], {})
    return [undecided(named.value, plugins) for named in layer.names["patches"] if foreign(named, known)]


def _general_plugins(facts: Facts) -> list[GeneralPlugin]:
    entries = [entry for entry in facts.in_group(GENERAL) if facts.loads(entry)]
    found = [GeneralPlugin(entry.name, entry.package, entry.module) for entry in entries]
    return [plugin for plugin in found if plugin.registers_patches]


def planned(facts: Facts) -> dict[str, set[str]]:
    """The names under each key of the plan, ``*`` among them, be it for some models only; none where it is at fault."""
    found: dict[str, set[str]] = {}
    if disabled(facts):
        return found
    try:
        chosen = _chosen(*_layers(facts))
    except ConfigError:
        return found
    for key, named in chosen:
        found.setdefault(key, set()).add(named.value)
    return found


def patches(facts: Facts) -> list[dict[str, str]]:
    """The patches that the plan names and somebody offers: name, class, package and the place that names each."""
    if disabled(facts):
        return []
    found: dict[str, dict[str, str]] = {}
    try:
        chosen = [named for key, named in _chosen(*_layers(facts)) if key == "patches"]
    except ConfigError:
        return []
    known = _known(facts, keys()["patches"], {})
    for named in chosen:
        try:
            items = items_of("patches", [named], known, {})
        except ConfigError:
            continue
        for item in items:
            row = {"name": item.name, "target": item.target, "package": item.package, "origin": item.origin}
            found.setdefault(item.name, row)
    return list(found.values())


def together(facts: Facts) -> bool:
    """Whether one server has all planned patches, and not those of one profile or another."""
    try:
        weak, strong = _layers(facts)
    except ConfigError:
        return False
    replaced = any("patches" in layer.names for layer in strong)
    return bool(replaced or facts.arguments.model) or not any("patches" in layer.names for layer in weak[1:])


def strict(facts: Facts) -> bool:
    """Whether a patch that cannot be applied stops a start; of profiles that differ, the strictest counts."""
    try:
        weak, strong = _layers(facts)
    except ConfigError:
        return True
    told = [layer.settings["on_failure"][0] for layer in strong if "on_failure" in layer.settings]
    if told:
        return told[-1] != "warn"
    if facts.arguments.model:
        told = [layer.settings["on_failure"][0] for layer in weak if "on_failure" in layer.settings]
        return not told or told[-1] != "warn"
    return any(layer.settings.get("on_failure", ("stop", ""))[0] != "warn" for layer in weak or [Layer("")])


def loads(facts: Facts, entry: Entry) -> bool:
    """Whether a server would load an entry point: of ours, where the plan names it or all there are."""
    if entry.group != OURS:
        return facts.uses(entry)
    return any({entry.name, ALL} & given for given in planned(facts).values())


def _asked(facts: Facts, variable: str) -> bool:
    return facts.environ.get(variable, "").strip().lower() not in ("", "0", "false", "no")


def _layers(facts: Facts) -> tuple[list[Layer], list[Layer]]:
    """The layers of the file, and those that replace what it says.

    Without a model's name every profile may match; where a file of vLLM's own names the model, nobody knows which.
    """
    path = find_file(facts.environ)
    file = read_file(path) if path is not None else None
    given = _additional_config(facts)
    strong = [layer for layer in (from_environment(facts.environ), from_additional_config(given)) if layer is not None]
    model = facts.arguments.model
    if file is None:
        return [], strong
    if not model:
        return [file.defaults, *([] if facts.arguments.given("--config") else file.profiles)], strong
    return layers_of(file, PlanRequest(model, tuple(facts.arguments.values("--served-model-name")))), strong


def _additional_config(facts: Facts) -> object:
    text = facts.arguments.value("--additional-config")
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where="--additional-config", fix="quote it as one word") from error


def _chosen(weak: list[Layer], strong: list[Layer]) -> list[tuple[str, Choice]]:
    """Every name that counts with its key: the last layer's, except that of the profiles of a file all do."""
    replaced = {key for layer in strong for key in layer.names}
    layers = [
        (key, name) for layer in weak for key, given in layer.names.items() if key not in replaced for name in given
    ]
    return [*layers, *((key, name) for key, given in merge_names(strong).items() for name in given)]


def _faults(facts: Facts, weak: list[Layer], strong: list[Layer]) -> Iterator[ConfigError]:
    options: dict[str, dict[str, tuple[OptionValue, str]]] = merge_options([*weak, *strong])
    for key, named in _chosen(weak, strong):
        known = _known(facts, keys()[key], options)
        if key == "patches" and foreign(named, known) and _general_plugins(facts):
            continue
        try:
            items_of(key, [named], known, options)
        except ConfigError as error:
            yield _placed(error, named)
    for item, given in options.items():
        try:
            check_option_owners({item: given}, _known(facts, POINTS[0], options))
        except ConfigError as error:
            yield error


def _placed(error: ConfigError, named: Choice) -> ConfigError:
    return error if error.where else ConfigError(error.what, where=named.origin, fix=error.fix)


def _known(
    facts: Facts, point: Point, options: Mapping[str, Mapping[str, tuple[OptionValue, str]]]
) -> dict[str, CatalogueEntry]:
    offered = {name: (target, "vllm-graft") for name, target in SHIPPED.items()}
    offered.update({entry.name: (entry.value, entry.package) for entry in facts.in_group(OURS)})
    given = {name: {option: value for option, (value, _) in options.get(name, {}).items()} for name in offered}
    return {
        # Our own are those of this interpreter, whatever path is examined.
        name: _Read(name, target, package, point, tuple(sys.path) if name in SHIPPED else facts.path, given[name])
        for name, (target, package) in offered.items()
    }


@dataclass(frozen=True, slots=True)
class _Read(CatalogueEntry):
    """An item whose class is not imported: another that has what the source says stands in for it."""

    point: Point
    path: tuple[str, ...]
    given: Mapping[str, OptionValue]

    def load(self) -> type:
        """A class of the same contract and options; of what cannot be read, the best is thought."""
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
        """The contracts among the class's bases, and its options; None where it declares none itself."""
        name, _, attribute = self.target.partition(":")
        module = modules.read(name, self.path)
        found = modules.definition(module, attribute, self.path) if isinstance(module, modules.Module) else None
        if found is None:
            return [], self.given
        holder, kind = found
        if not isinstance(kind, ast.ClassDef):
            return [], self.given
        bases = [base for node in kind.bases if (base := _contract(holder, node))]
        for statement in kind.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "options" for target in targets):
                return bases, self._literal(getattr(statement, "value", None))
        return bases, None if len(bases) == len(kind.bases) else self.given

    def _literal(self, node: ast.expr | None) -> Mapping[str, OptionValue]:
        try:
            value = ast.literal_eval(node) if node is not None else None
        except (ValueError, TypeError, SyntaxError):
            value = None
        return value if isinstance(value, dict) else self.given


def _contract(module: modules.Module, base: ast.expr) -> str:
    """The contract of vllm-graft that a base class is; empty where it is another class."""
    node = base.value if isinstance(base, ast.Subscript) else base
    if not isinstance(node, ast.Name):
        return ""
    bound = module.only(node.id)
    if not isinstance(bound, ast.ImportFrom) or not (bound.module or "").startswith("vllm_graft"):
        return ""
    name = next(alias.name for alias in bound.names if (alias.asname or alias.name) == node.id)
    return name if name in _CONTRACTS else ""
