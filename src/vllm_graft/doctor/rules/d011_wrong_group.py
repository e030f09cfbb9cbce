"""D011: entry points in a group that looks like one of vLLM's but is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from vllm_graft.doctor.environment import GROUPS, Environment
from vllm_graft.findings import Finding, Level
from vllm_graft.plan.catalogue import ITEM_GROUP

CODE = "D011"
TITLE = "A group that is never read"

_CLOSE = 0.74
_CERTAIN = 0.95


def check(env: Environment) -> Iterator[Finding]:
    """Find misspelt groups: vLLM does not look for their plugins, and no tool calls it an error."""
    known = (*GROUPS, ITEM_GROUP)
    for group in dict.fromkeys(entry.group for entry in env.entries if entry.group not in known):
        meant = _meant(group, env)
        if meant is None:
            continue
        right = [(entry.name, entry.value) for entry in env.in_group(meant)]
        # Some register twice, for an older reader too.
        entries = [entry for entry in env.in_group(group) if (entry.name, entry.value) not in right]
        if not entries:
            continue
        packages = ", ".join(sorted({entry.package for entry in entries}))
        names = ", ".join(entry.name for entry in entries)
        reader = "vllm-graft" if meant == ITEM_GROUP else "vLLM"
        hint = f" (did you mean {meant!r}?)" if meant else f" (there is: {', '.join(GROUPS)})"
        what = f"{reader} reads no such group, so this is never loaded: {names}{hint}"
        fix = f"correct the group in the metadata of {packages} and install it again"
        level: Level = "error" if meant and _nearest(_plain(group), known, _CERTAIN) is not None else "warning"
        yield Finding(CODE, level, f"group {group!r} of {packages}", what, entries[0].where, fix)


def _meant(group: str, env: Environment) -> str | None:
    """Return the group that was meant; empty for one under vLLM's name that is like none, None for a foreign group."""
    owner = group.partition(".")[0]
    plain = _plain(group)
    if _plain(owner) == "vllm_graft" or plain.startswith("vllm_graft"):
        return ITEM_GROUP if _nearest(plain, (ITEM_GROUP,)) else None
    # A group under another package's own name, as ``vllm_omni.plugins``, is that package's.
    if owner.lower() != "vllm" and any(package.name == _plain(owner).replace("_", "-") for package in env.packages):
        return None
    # The installed vLLM may read a group that this rule does not know yet.
    if env.root is not None and env.classes.mentions("vllm.plugins:", f'"{group}"'):
        return None
    close = _nearest(plain, GROUPS)
    return close if close or owner != "vllm" else ""


def _plain(group: str) -> str:
    return re.sub(r"[-_.]+", "_", group.lower())


def _nearest(plain: str, groups: tuple[str, ...], cutoff: float = _CLOSE) -> str | None:
    spelled = {}
    for group in groups:
        whole = group.replace(".", "_")
        stem = whole.removesuffix("_plugins")
        spelled.update(dict.fromkeys((whole, f"{stem}s", stem), group))
    close = difflib.get_close_matches(plain, spelled, n=1, cutoff=cutoff)
    return spelled[close[0]] if close else None
