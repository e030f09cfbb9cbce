"""Refuse to start on another platform after a platform plugin raised.

vLLM calls every platform plugin when it is first imported, before general plugins are loaded, and skips one that
raises: what was meant for an accelerator runs on a CPU (vLLM issue #48277; nothing is logged up to 0.28, one line at
DEBUG since). Our code comes too late to see that, and vLLM does not keep what it caught. So with a plan the front end
calls the plugins once more, except that of the package whose platform is in use; vLLM itself calls the chosen one twice
in every process. A plugin that raised during vLLM's import, and no longer does, now offers a platform that is not in
use.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

from vllm_graft.errors import StartError

PLATFORM_GROUP: Final = "vllm.platform_plugins"
"""The entry-point group in which packages offer platforms to vLLM."""


def refuse_broken() -> None:
    """Stop the start if a platform plugin raised when vLLM called it; the error names it and its package."""
    from vllm import envs, platforms

    # Since 0.28 a vLLM with VLLM_TARGET_DEVICE=cpu calls no plugin.
    code = getattr(getattr(platforms, "resolve_current_platform_cls_qualname", None), "__code__", None)
    if code is not None and "VLLM_TARGET_DEVICE" in code.co_names and envs.VLLM_TARGET_DEVICE == "cpu":
        return
    chosen = type(platforms.current_platform)
    # As vLLM keeps them: of two with one name, the last.
    by_name = {entry.name: entry for entry in metadata.entry_points(group=PLATFORM_GROUP)}
    for entry in by_name.values():
        called = envs.VLLM_PLUGINS is None or entry.name in envs.VLLM_PLUGINS
        if not called or _package(entry.value) in ("vllm_graft", _package(chosen.__module__)):
            continue
        error = None
        try:
            offered = entry.load()()
        except Exception as raised:
            error = raised
            trouble = " ".join(f"raised {type(raised).__name__}: {raised}".split())
        else:
            if offered is None or _package(str(offered)) == _package(chosen.__module__):
                continue
            trouble = f"offers {offered} now, but failed when vLLM asked it, in the middle of its own import"
        owner = entry.dist.name if entry.dist is not None else "an unnamed distribution"
        raise StartError(
            f"the platform plugin {entry.name!r} of {owner} ({entry.value}) {trouble}; vLLM has ignored that and "
            f"runs on {chosen.__name__}",
            where=f"entry points of {PLATFORM_GROUP}",
            fix=f"fix or uninstall {owner}; to go on without it, set VLLM_PLUGINS to a list that has 'graft' but not "
            f"{entry.name!r}",
        ) from error


def _package(path: str) -> str:
    """Return the top package of ``package.module`` or ``package.module:name``."""
    return path.partition(":")[0].partition(".")[0].strip()
