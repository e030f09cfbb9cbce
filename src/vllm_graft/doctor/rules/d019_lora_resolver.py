"""D019: LoRA resolvers for which some but not all settings are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_graft.doctor import engine, resolvers
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding, Level

CODE = "D019"
TITLE = "A LoRA resolver that is never asked"


def check(facts: Facts) -> Iterator[Finding]:
    """A source, the allow-list, runtime updating and ``--enable-lora`` must line up: vLLM #18630."""
    for name, source in resolvers.SOURCES.items():
        if facts.environ.get(source) or name in (facts.allowed or ()):
            yield from _own(facts, name, source)
    for entry in resolvers.others(facts):
        missing = _missing(facts)
        if missing:
            yield Finding(
                CODE,
                "warning",
                f"plugin {entry.name!r}",
                f"it registers a LoRA resolver, which is not used: {_and(missing)}",
                f"{entry.package}: {entry.value}",
                _fix(missing),
            )


def _own(facts: Facts, name: str, source: str) -> Iterator[Finding]:
    missing = {} if facts.environ.get(source) else {f"{source} is not set": f"set {source}"}
    if not resolvers.is_let_in(facts, name):
        missing[f"VLLM_PLUGINS does not name {name}"] = f"add {name} to VLLM_PLUGINS"
    missing |= _missing(facts)
    if missing:
        yield Finding(
            CODE,
            _level(facts, name, source),
            f"plugin {name!r}",
            f"this LoRA resolver is asked for and will not resolve anything: {_and(missing)}",
            source if facts.environ.get(source) else "VLLM_PLUGINS",
            _fix(missing),
        )
    folder = facts.environ.get(source)
    if name == resolvers.FILESYSTEM and folder and resolvers.is_let_in(facts, name) and not Path(folder).is_dir():
        fault = "is no folder" if Path(folder).exists() else "does not exist"
        yield Finding(
            CODE,
            "error",
            f"plugin {name!r}",
            f"{folder} {fault}, and the plugin raises ValueError for that, which stops every vLLM process",
            source,
            f"make the folder, or correct {source}",
        )


def _level(facts: Facts, name: str, source: str) -> Level:
    """An error where two settings ask for it: a source may be part of an image, a name of a list that keeps all on."""
    lora = facts.arguments.switched("--enable-lora") and not facts.arguments.given("--lora-modules")
    meant = bool(engine.switched_on(facts, resolvers.UPDATING) or lora)
    if not facts.environ.get(source):
        return "warning" if meant else "info"
    return "error" if meant or name in (facts.allowed or ()) else "warning"


def _missing(facts: Facts) -> dict[str, str]:
    """What any resolver lacks, each with its cure; the arguments count only where there are some."""
    missing = {}
    if not engine.switched_on(facts, resolvers.UPDATING):
        missing[f"{resolvers.UPDATING} is not 1"] = f"set {resolvers.UPDATING}=1"
    if facts.arguments.words and not facts.arguments.switched("--enable-lora"):
        missing["--enable-lora is not given"] = "start with --enable-lora"
    return missing


def _and(missing: dict[str, str]) -> str:
    return ", and ".join(missing)


def _fix(missing: dict[str, str]) -> str:
    return ", ".join(missing.values())
