"""D031: a stat logger that vLLM refuses or cannot call: no StatLoggerBase, a method that is missing or does not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from vllm_graft.doctor.classes import is_abstract, listed, methods_of, takes
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.sources.fingerprint import Function

CODE = "D031"
TITLE = "A stat logger that vLLM refuses"

STAT_LOGGER_GROUP: Final = "vllm.stat_logger_plugins"
BASE: Final = "vllm.v1.metrics.loggers:StatLoggerBase"


def check(env: Environment) -> Iterator[Finding]:
    """Check stat loggers, which every API server makes as soon as they are installed, --disable-log-stats or not."""
    if env.vllm is None:
        return
    record = methods_of(env.classes.lineage(BASE) or ()).get("record")
    # vLLM passes the first two by position.
    named = [one.arg for one in record.args.args[3:]] if record is not None else []
    passed = {
        "__init__": "vllm_config and engine_index",
        "record": ", ".join(["scheduler_stats", "iteration_stats", *(f"{name}=" for name in named)]),
    }
    for entry in env.in_group(STAT_LOGGER_GROUP):
        if env.classes.look_up(entry).kind != "class":
            continue  # D007 and D012 cover those
        methods = methods_of(env.classes.lineage(entry) or ())
        missing = [name for name, each in methods.items() if is_abstract(each)]
        then = "an API server of vLLM stops at its start with a TypeError"
        if env.classes.is_a(entry, BASE) == "no":
            what, fix = "it does not derive from StatLoggerBase", f"derive the class from {BASE.replace(':', '.')}"
        elif missing:
            what = f"it does not define {listed(missing)}, which vLLM's class leaves abstract"
            fix = f"define {listed(missing)}"
        elif unfit := next((name for name in passed if not _takes(methods.get(name), named)), ""):
            what = f"{unfit} does not take what vLLM passes: {passed[unfit]}"
            fix = f"give {unfit} these parameters"
            then = then if unfit == "__init__" else "the server stops with a TypeError when the first statistics arrive"
        else:
            continue
        what = f"{what}; {then}"
        fix = f"{fix}, or uninstall {entry.package}"
        level: Level = "error" if env.loads(entry) else "warning"
        yield Finding(CODE, level, f"stat logger {entry.name!r}", what, entry.origin, fix)


def _takes(method: Function | None, named: Collection[str]) -> bool:
    """Return whether a method takes vLLM's call of it; a decorated one, or what is not a ``def``, is assumed to."""
    by_name = named if method is not None and method.name == "record" else ()
    return method is None or bool(method.decorator_list) or takes(method, 2, by_name)
