"""The items that a plan may name: those that ship with the package, and those that other packages offer.

Other packages offer contracts and patches under the entry-point group ``vllm_graft.plugins``, name to class. They are
found by metadata alone; a class is imported only when a plan names it. Patches that a general plugin has registered
with a ``PatchManager`` in this process count too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from vllm_graft.errors import ConfigError, describe_error
from vllm_graft.plan.import_checkpoint import checkpoint

ITEM_GROUP: Final = "vllm_graft.plugins"
"""The entry-point group in which packages offer items."""

SHIPPED: Final[Mapping[str, str]] = {
    "async-history": "vllm_graft.plugins.patches.async_history:AsyncHistory",
    "cpu-seeds": "vllm_graft.plugins.patches.cpu_seeds:CpuSeeds",
    "lora-path-guard": "vllm_graft.plugins.patches.lora_path_guard:LoraPathGuard",
    "stat-logger-guard": "vllm_graft.plugins.patches.stat_logger_guard:StatLoggerGuard",
    "constrained-json": "vllm_graft.plugins.samplers.constrained_json:ConstrainedJSONSampler",
    "dry": "vllm_graft.plugins.samplers.dry:Dry",
    "no-repeat-ngram": "vllm_graft.plugins.samplers.no_repeat_ngram:NoRepeatNgram",
    "top-n-sigma": "vllm_graft.plugins.samplers.top_n_sigma:TopNSigma",
    "xtc": "vllm_graft.plugins.samplers.xtc:Xtc",
    "compact-window": "vllm_graft.plugins.attention.compact_window:CompactWindow",
    "scored-blocks": "vllm_graft.plugins.attention.scored_blocks:ScoredBlocks",
    "sink-window": "vllm_graft.plugins.attention.sink_window:SinkWindow",
    "expert-mask": "vllm_graft.plugins.routers.expert_mask:ExpertMask",
    "priority-fairness": "vllm_graft.plugins.schedulers.priority_fairness:PriorityFairness",
    "tenant-fairness": "vllm_graft.plugins.schedulers.tenant_fairness:TenantFairness",
    "fewest-moves": "vllm_graft.plugins.balancers.fewest_moves:FewestMoves",
    "stock-balancer": "vllm_graft.plugins.balancers.stock:StockBalancer",
    "request-log": "vllm_graft.plugins.stats.request_log:RequestLog",
}
"""The items of this package: name to class."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One name that a plan may use, and the class behind it."""

    name: str
    target: str
    package: str

    def load(self) -> type:
        """Import the class; raise ConfigError naming the package if that fails."""
        return load(self.target, self.name, self.package)


def catalogue() -> dict[str, CatalogueEntry]:
    """Return every name that a plan may use; raise ConfigError if two packages offer the same one."""
    found = {name: CatalogueEntry(name, target, "vllm-graft") for name, target in SHIPPED.items()}
    for entry in metadata.entry_points(group=ITEM_GROUP):
        package = entry.dist.name if entry.dist is not None else "an unnamed distribution"
        offered = CatalogueEntry(entry.name, entry.value, package)
        known = found.get(entry.name)
        if known is not None and known != offered:
            both = f"by {known.package} ({known.target}) and by {package} ({entry.value})"
            where, fix = f"entry points of {ITEM_GROUP}", f"uninstall one of the two, or have {package} rename it"
            raise ConfigError(f"the item {entry.name!r} is offered twice: {both}", where=where, fix=fix)
        found[entry.name] = offered
    manager = sys.modules.get("vllm_graft.patching.manager")
    for name, patch in manager.registered() if manager is not None else ():
        offered = CatalogueEntry(name, f"{patch.__module__}:{patch.__qualname__}", patch.declaration.package)
        known = found.setdefault(name, offered)
        if known.target != offered.target:
            both = f"as {known.target} of {known.package} and as {offered.target} of {offered.package}"
            what, fix = f"the patch {name!r} is registered twice: {both}", "register one of the two under another name"
            raise ConfigError(what, where="PatchManager.register", fix=fix)
    return found


def load(target: str, name: str, package: str) -> type:
    """Import ``module:Class``; raise ConfigError naming item and package if that fails."""
    module, _, qualname = target.partition(":")
    try:
        with checkpoint.importing(module):
            found: object = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except BaseException as error:
        from vllm_graft.ledger.guard import raised_by_signal

        if raised_by_signal(error):
            raise
        raise ConfigError(
            f"the item {name!r} of {package} cannot be imported from {target}: {describe_error(error)}",
            fix=f"repair or reinstall {package}, or remove {name!r} from the plan",
        ) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"the item {name!r} of {package} must be a class, but {target} is {type(found).__name__}",
            fix=f"point the entry point {name!r} at the class itself",
        )
    return found
