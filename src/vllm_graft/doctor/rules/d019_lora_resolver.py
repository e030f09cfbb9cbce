"""D019: LoRA resolvers for which some but not all settings are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level

CODE = "D019"
TITLE = "A LoRA resolver that is never asked"


def check(env: Environment) -> Iterator[Finding]:
    """Find resolvers without a source, a place on the list, runtime updating or ``--enable-lora`` (vLLM #18630)."""
    for name, source in server.RESOLVER_SOURCES.items():
        if env.variables.get(source) or name in (env.allowed or ()):
            yield from _own(env, name, source)
    for entry in server.foreign_resolvers(env):
        missing = _missing(env)
        if missing:
            what = f"it registers a LoRA resolver, which is not used: {', and '.join(missing)}"
            yield Finding(CODE, "warning", f"plugin {entry.name!r}", what, entry.origin, ", ".join(missing.values()))


def _own(env: Environment, name: str, source: str) -> Iterator[Finding]:
    missing = {} if env.variables.get(source) else {f"{source} is not set": f"set {source}"}
    if not server.is_let_in(env, name):
        missing[f"VLLM_PLUGINS does not name {name}"] = f"add {name} to VLLM_PLUGINS"
    missing |= _missing(env)
    if missing:
        what = f"this LoRA resolver is asked for but will not resolve anything: {', and '.join(missing)}"
        where = source if env.variables.get(source) else "VLLM_PLUGINS"
        # An error if two settings ask for it: one may be part of an image, or of a list that keeps all on.
        lora = env.arguments.switched("--enable-lora") and not env.arguments.given("--lora-modules")
        meant = bool(server.switched_on(env, server.LORA_UPDATING) or lora)
        level: Level = "error" if meant or name in (env.allowed or ()) else "warning"
        if not env.variables.get(source):
            level = "warning" if meant else "info"
        yield Finding(CODE, level, f"plugin {name!r}", what, where, ", ".join(missing.values()))
    folder = env.variables.get(source)
    if name == server.FILESYSTEM_RESOLVER and folder and server.is_let_in(env, name) and not Path(folder).is_dir():
        fault = "is not a folder" if Path(folder).exists() else "does not exist"
        what = f"{folder} {fault}, and the plugin raises ValueError for that, which stops every vLLM process"
        fix = f"make the folder, or correct {source}"
        yield Finding(CODE, "error", f"plugin {name!r}", what, source, fix)


def _missing(env: Environment) -> dict[str, str]:
    """Return what every resolver lacks, with the next step; the arguments count only if there are some."""
    missing = {}
    if not server.switched_on(env, server.LORA_UPDATING):
        missing[f"{server.LORA_UPDATING} is not 1"] = f"set {server.LORA_UPDATING}=1"
    if env.arguments.words and not env.arguments.switched("--enable-lora"):
        missing["--enable-lora is not given"] = "start with --enable-lora"
    return missing
