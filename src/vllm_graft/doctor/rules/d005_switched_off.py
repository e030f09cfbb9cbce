"""D005: ``VLLM_PLUGINS`` is one allow-list for all groups, so naming one plugin switches the others off."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import plans, server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.switches import disabled

CODE = "D005"
TITLE = "Plugins that VLLM_PLUGINS switches off"


def check(env: Environment) -> Iterator[Finding]:
    """Find what is installed but not on the list: every group that obeys the list skips it silently."""
    if env.allowed is None:
        return
    # A name with blanks around it has a rule of its own.
    spaced = {name.strip() for name in env.allowed}
    off = [entry for entry in env.plugins if not env.loads(entry) and entry.name not in spaced]
    ours = [entry for entry in off if entry.name == "graft" and entry.package == "vllm-graft"]
    theirs = [entry for entry in off if entry.top_level == "vllm"]
    others = [entry for entry in off if entry not in ours and entry not in theirs]
    if ours and not disabled(env.variables):
        level: Level = "info"
        what = "VLLM_PLUGINS does not list it, so nothing of vllm-graft runs; nothing asks it to do anything either"
        fix = "add graft to the list before you need it"
        if asked := plans.configured(env):
            level = "error"
            what = f"VLLM_PLUGINS does not list it, so nothing of vllm-graft runs, although {asked} asks it to"
            fix = f"set VLLM_PLUGINS={_list(env, ['graft'])}; GRAFT_DISABLE=1 asks for the stock server"
        yield Finding(CODE, level, "plugin 'graft'", what, "VLLM_PLUGINS", fix)
    if others:
        names = ", ".join(f"{entry.name} ({entry.package}, {entry.group})" for entry in others)
        what = f"is an allow-list for all groups and switches off: {names}"
        fix = f"to have them, set VLLM_PLUGINS={_list(env, [entry.name for entry in others])}"
        yield Finding(CODE, "warning", "VLLM_PLUGINS", what, "VLLM_PLUGINS", fix)
    # D019 covers a resolver that has a source of adapters.
    sources = server.RESOLVER_SOURCES
    idle = sorted({entry.name for entry in theirs if not env.variables.get(sources.get(entry.name, ""))})
    if idle:
        what = f"switches off vLLM's own {', '.join(idle)} too"
        fix = "add them if LoRA adapters are to be found at run time"
        yield Finding(CODE, "info", "VLLM_PLUGINS", what, "VLLM_PLUGINS", fix)


def _list(env: Environment, names: list[str]) -> str:
    listed = [name.strip() for name in env.allowed or () if name.strip()]
    return ",".join(dict.fromkeys([*listed, *names]))
