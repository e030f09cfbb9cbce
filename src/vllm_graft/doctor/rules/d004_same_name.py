"""D004: one entry-point name, registered twice."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import plans
from vllm_graft.doctor.environment import GROUPS, EntryPoint, Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.plan.catalogue import ITEM_GROUP

CODE = "D004"
TITLE = "The same plugin name twice"


def check(env: Environment) -> Iterator[Finding]:
    """Find a name twice: in one group the last one found replaces the others, in two groups it switches both."""
    for group in (*GROUPS, ITEM_GROUP):
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in env.in_group(group):
            by_name.setdefault(entry.name, []).append(entry)
        for name, entries in by_name.items():
            # vLLM does not mind two packages that register one object; vllm-graft does.
            if len({entry.value if group != ITEM_GROUP else entry.where for entry in entries}) > 1:
                yield from _in_one_group(env, group, name, entries)
    gated = [entry for entry in env.plugins if entry.group != "vllm.logits_processors"]
    for name in dict.fromkeys(entry.name for entry in gated) if env.allowed is not None else ():
        entries = [entry for entry in gated if entry.name == name]
        if len({entry.group for entry in entries}) > 1 and len({entry.package for entry in entries}) > 1:
            places = ", ".join(f"{entry.package} in {entry.group}" for entry in entries)
            what = f"is registered by {places}: VLLM_PLUGINS matches the name alone and switches them all at once"
            fix = "have one of them renamed to switch them apart"
            yield Finding(CODE, "info", f"plugin {name!r}", what, "VLLM_PLUGINS", fix)


def _in_one_group(env: Environment, group: str, name: str, entries: list[EntryPoint]) -> Iterator[Finding]:
    offers = ", ".join(f"{entry.package} ({entry.value})" for entry in entries)
    last = entries[-1]
    if group == ITEM_GROUP:
        what = f"is offered by {offers}, and vllm-graft refuses every plan while two packages offer one name"
        fix = "uninstall one of them, or have one renamed"
        level: Level = "error" if plans.planned(env) else "warning"
        yield Finding(CODE, level, f"item {name!r}", what, f"entry points of {group}", fix)
    # load_plugins_by_group has a dictionary by name; logits processors are kept in a list.
    elif group != "vllm.logits_processors" and env.loads(last):
        what = (
            f"is registered by {offers}; vLLM keeps one of a name, the last that it finds, which is that of "
            f"{last.package}: the others never run, and nothing is logged"
        )
        fix = f"uninstall all but one of {', '.join(dict.fromkeys(entry.package for entry in entries))}"
        level = "error" if env.uses(last) else "warning"
        yield Finding(CODE, level, f"plugin {name!r}", what, f"entry points of {group}", fix)
