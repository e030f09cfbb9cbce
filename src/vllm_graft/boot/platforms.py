"""A platform plugin of another package that raised: the start stops, instead of going on upon another platform.

vLLM asks every platform plugin for its platform when it is first imported, before general plugins are loaded, and
passes over one that raises: what was meant for an accelerator runs on a CPU (vLLM issue #48277; nothing is logged up to
0.28, one line at DEBUG since). Nothing of ours can be there in time, and vLLM keeps nothing of what it caught. So the
plugins are asked once more, when a plan is in force: by the front end alone, once, and not the package whose platform
is in force. That is what vLLM does itself, which asks the chosen one twice in every process. One that raised in the
middle of vLLM's import, and no longer does, gives itself away: it offers a platform that is not in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Final

from vllm_graft.errors import StartError

GROUP: Final = "vllm.platform_plugins"
"""The entry-point group in which packages offer platforms to vLLM."""


def refuse_broken() -> None:
    """Stop the start if a platform plugin raised when vLLM asked it: name it, its package, and the way on."""
    from vllm.platforms import current_platform

    chosen = type(current_platform)
    for entry in _asked_by_vllm():
        trouble, error = _ask_again(entry, chosen)
        if not trouble:
            continue
        owner = entry.dist.name if entry.dist is not None else "an unnamed distribution"
        raise StartError(
            f"the platform plugin {entry.name!r} of {owner} ({entry.value}) {trouble}; vLLM has passed over that and "
            f"runs on {chosen.__name__}",
            where=f"entry points of {GROUP}",
            fix=f"mend or uninstall {owner}; to go on without it, set VLLM_PLUGINS to a list that has 'graft' and not "
            f"{entry.name!r}",
        ) from error


def _asked_by_vllm() -> Iterator[metadata.EntryPoint]:
    """The platform plugins of other packages that vLLM has asked: all, or those that VLLM_PLUGINS lists."""
    from vllm import envs

    if _cpu_was_ordered():
        return
    listed = envs.VLLM_PLUGINS
    # As vLLM keeps them: of two with one name, the last.
    by_name = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    for entry in by_name.values():
        if _package(entry.value) != "vllm_graft" and (listed is None or entry.name in listed):
            yield entry


def _cpu_was_ordered() -> bool:
    """Whether this vLLM takes VLLM_TARGET_DEVICE=cpu for an order and asks no plugin then, as it does since 0.28."""
    from vllm import envs, platforms

    code = getattr(getattr(platforms, "resolve_current_platform_cls_qualname", None), "__code__", None)
    return code is not None and "VLLM_TARGET_DEVICE" in code.co_names and envs.VLLM_TARGET_DEVICE == "cpu"


def _ask_again(entry: metadata.EntryPoint, chosen: type) -> tuple[str, Exception | None]:
    """What is wrong with a plugin, and the exception it raises now; nothing where its platform is in force."""
    in_force = _package(chosen.__module__)
    if _package(entry.value) == in_force:
        return "", None
    try:
        offered = entry.load()()
    except Exception as error:
        return " ".join(f"raised {type(error).__name__}: {error}".split()), error
    if offered is None or _package(str(offered)) == in_force:
        return "", None
    return f"offers {offered} now, and failed when vLLM asked it, in the middle of its own import", None


def _package(path: str) -> str:
    """The package at the top of ``package.module`` or ``package.module:name``."""
    return path.partition(":")[0].partition(".")[0].strip()
