"""The installed plugins, a row each: which processes load it, or why none does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import GROUPS, Environment
from vllm_graft.findings import Finding
from vllm_graft.plan.catalogue import ITEM_GROUP

PLACES: Final[Mapping[str, str]] = {
    "vllm.general_plugins": "every process",
    "vllm.platform_plugins": "every process, before all others",
    "vllm.io_processor_plugins": "front end, if --io-processor-plugin or the model names it",
    "vllm.stat_logger_plugins": "front end of a server",
    "vllm.endpoint_plugins": "API servers",
    "vllm.logits_processors": "workers, and front ends to check requests",
    ITEM_GROUP: "if a plan names it",
}
"""The processes that load the plugins of each group."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed plugin.

    where:  the processes that load it, or the reason why none does
    codes:  the codes of the findings about it
    idle:   whether it registers nothing when it is loaded, as vLLM's own LoRA resolvers do without a source
    """

    name: str
    group: str
    package: str
    target: str
    loads: bool
    where: str
    codes: tuple[str, ...] = ()
    idle: bool = False

    def as_dict(self) -> dict[str, object]:
        """The row with stable lower-case keys, for ``--json``."""
        return {**asdict(self), "codes": list(self.codes)}


def plugins(env: Environment, findings: Iterable[Finding] = ()) -> list[Plugin]:
    """Return a row for every plugin, those that will not load first."""
    known, rows = list(findings), []
    for entry in env.in_group(*GROUPS, ITEM_GROUP):
        loads = entry.group == ITEM_GROUP or env.loads(entry)
        about = (each for each in known if repr(entry.name) in each.subject or entry.name in each.subject.split())
        codes = tuple(dict.fromkeys(each.code for each in about if each.level != "info"))
        # vLLM's own LoRA resolvers register nothing without a source of adapters.
        source = server.RESOLVER_SOURCES.get(entry.name) if loads and entry.top_level == "vllm" else None
        lacks = ""
        if source is not None and not env.variables.get(source):
            lacks = f"registers nothing: {source} is not set"
        elif source is not None and not server.is_let_in(env, entry.name):
            lacks = "registers nothing: VLLM_PLUGINS must name it"
        where = f"{PLACES[entry.group]}; {lacks}" if lacks else PLACES[entry.group]
        if not loads:
            unset = env.allowed is None
            where = f"not loaded: VLLM_PLUGINS {'must name it, but is not set' if unset else 'does not name it'}"
        rows.append(Plugin(entry.name, entry.group, entry.package, entry.value, loads, where, codes, bool(lacks)))
    return sorted(rows, key=lambda row: (row.loads and not row.codes, row.loads, row.group, row.name))
