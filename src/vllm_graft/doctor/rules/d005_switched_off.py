"""D005: ``VLLM_PLUGINS`` is one allow-list for all groups, so naming one plugin switches the others off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor import plans
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import Entry
from vllm_graft.doctor.resolvers import SOURCES
from vllm_graft.findings import Finding

CODE = "D005"
TITLE = "Plugins that VLLM_PLUGINS switches off"

_GRAFT: Final = "graft"


def check(facts: Facts) -> Iterator[Finding]:
    """What is installed and not on the list is passed over in every group that obeys it, without a word."""
    if facts.allowed is None:
        return
    # A name with blanks around it has a rule of its own.
    spaced = {name.strip() for name in facts.allowed}
    off = [entry for entry in facts.plugins if not facts.loads(entry) and entry.name not in spaced]
    ours = [entry for entry in off if entry.name == _GRAFT and entry.package == "vllm-graft"]
    theirs = [entry for entry in off if entry.module.partition(".")[0] == "vllm"]
    others = [entry for entry in off if entry not in ours and entry not in theirs]
    if ours and not plans.disabled(facts):
        yield _graft(facts)
    if others:
        names = ", ".join(f"{entry.name} ({entry.package}, {entry.group})" for entry in others)
        what = f"is an allow-list for all groups and switches off: {names}"
        yield Finding(CODE, "warning", "VLLM_PLUGINS", what, "VLLM_PLUGINS", _add(facts, others))
    yield from _own(facts, theirs)


def _graft(facts: Facts) -> Finding:
    asked = plans.configured(facts)
    if not asked:
        what = "VLLM_PLUGINS does not list it, so nothing of vllm-graft runs; nothing asks it to do anything either"
        return Finding(CODE, "info", "plugin 'graft'", what, "VLLM_PLUGINS", "add graft to the list before you need it")
    what = f"VLLM_PLUGINS does not list it, so nothing of vllm-graft runs, although {asked} asks it to"
    fix = f"set VLLM_PLUGINS={_list(facts, [_GRAFT])}; GRAFT_DISABLE=1 says that the stock server is meant"
    return Finding(CODE, "error", "plugin 'graft'", what, "VLLM_PLUGINS", fix)


def _own(facts: Facts, entries: list[Entry]) -> Iterator[Finding]:
    # One that has been given something to do is D019's.
    idle = sorted({entry.name for entry in entries if not facts.environ.get(SOURCES.get(entry.name, ""))})
    if idle:
        what = f"switches off vLLM's own {', '.join(idle)} too"
        fix = "add them if LoRA adapters are to be found at run time"
        yield Finding(CODE, "info", "VLLM_PLUGINS", what, "VLLM_PLUGINS", fix)


def _add(facts: Facts, entries: list[Entry]) -> str:
    return f"to have them, set VLLM_PLUGINS={_list(facts, [entry.name for entry in entries])}"


def _list(facts: Facts, names: list[str]) -> str:
    listed = [name.strip() for name in facts.allowed or () if name.strip()]
    return ",".join(dict.fromkeys([*listed, *names]))
