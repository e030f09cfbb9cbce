"""D031: a stat logger that vLLM refuses or cannot make: no StatLoggerBase, or one that lacks an abstract method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_graft.doctor.classes import is_abstract, listed, methods_of
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level

CODE = "D031"
TITLE = "A stat logger that vLLM refuses"

GROUP: Final = "vllm.stat_logger_plugins"
BASE: Final = "vllm.v1.metrics.loggers:StatLoggerBase"


def check(env: Environment) -> Iterator[Finding]:
    """Check stat loggers, which every API server makes as soon as they are installed, --disable-log-stats or not."""
    if env.vllm is None:
        return
    for entry in env.in_group(GROUP):
        if env.classes.look_up(entry).kind != "class":
            continue  # D007 and D012 speak of those
        missing = [name for name, each in methods_of(env.classes.lineage(entry) or ()).items() if is_abstract(each)]
        if env.classes.is_a(entry, BASE) == "no":
            what, fix = "it does not derive from StatLoggerBase", f"derive the class from {BASE.replace(':', '.')}"
        elif missing:
            what = f"it does not define {listed(missing)}, which vLLM's class leaves abstract"
            fix = f"define {listed(missing)}"
        else:
            continue
        what = f"{what}; an API server of vLLM stops at its start with a TypeError"
        fix = f"{fix}, or uninstall {entry.package}"
        level: Level = "error" if env.loads(entry) else "warning"
        yield Finding(CODE, level, f"stat logger {entry.name!r}", what, entry.origin, fix)
