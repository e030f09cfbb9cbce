"""What is installed and what becomes of it: a row for each plugin, for a person who has ten seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from vllm_graft.doctor import resolvers
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import GROUPS, OURS, Entry
from vllm_graft.findings import Finding

PLACES: Final[Mapping[str, str]] = {
    "vllm.general_plugins": "every process",
    "vllm.platform_plugins": "every process, before all others",
    "vllm.io_processor_plugins": "front end, if --io-processor-plugin or the model names it",
    "vllm.stat_logger_plugins": "front end of a server",
    "vllm.endpoint_plugins": "API servers",
    "vllm.logits_processors": "workers, and front ends to check requests",
    OURS: "where a plan names it",
}
"""Where vLLM loads the plugins of a group."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed plugin.

    loads:  whether vLLM takes it at all
    where:  the processes that load it; of one that is not loaded, why not
    codes:  the findings that speak of it
    idle:   whether it is loaded and then registers nothing, as vLLM's own LoRA resolvers do without a source
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


def plugins(facts: Facts, findings: Iterable[Finding] = ()) -> list[Plugin]:
    """Every plugin, those that will not load first."""
    said = list(findings)
    rows = [_plugin(facts, entry, said) for entry in facts.in_group(*GROUPS, OURS)]
    return sorted(rows, key=lambda row: (row.loads and not row.codes, row.loads, row.group, row.name))


def _plugin(facts: Facts, entry: Entry, findings: Iterable[Finding]) -> Plugin:
    loads = entry.group == OURS or facts.loads(entry)
    codes = tuple(dict.fromkeys(each.code for each in findings if each.level != "info" and _speaks(each, entry)))
    lacks = _lacks(facts, entry) if loads else ""
    where = f"{PLACES[entry.group]}; {lacks}" if lacks else PLACES[entry.group] if loads else _why_not(facts, entry)
    return Plugin(entry.name, entry.group, entry.package, entry.value, loads, where, codes, bool(lacks))


def _speaks(finding: Finding, entry: Entry) -> bool:
    return repr(entry.name) in finding.subject or entry.name in finding.subject.split()


def _lacks(facts: Facts, entry: Entry) -> str:
    """Why one of vLLM's own LoRA resolvers registers nothing; empty where it does, and for all other plugins."""
    source = resolvers.SOURCES.get(entry.name)
    if source is None or entry.module.partition(".")[0] != "vllm":
        return ""
    if not facts.environ.get(source):
        return f"registers nothing: {source} is not set"
    return "" if resolvers.is_let_in(facts, entry.name) else "registers nothing: VLLM_PLUGINS must name it"


def _why_not(facts: Facts, entry: Entry) -> str:
    if facts.allowed is None:
        return "not loaded: VLLM_PLUGINS must name it, and is not set"
    return "not loaded: VLLM_PLUGINS does not name it"
