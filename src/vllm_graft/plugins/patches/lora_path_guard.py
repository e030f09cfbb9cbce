"""``lora-path-guard``: the filesystem LoRA resolver answers only for adapters below its own folder.

vLLM's resolver joins the adapter's name, which is the ``model`` of any request, to ``VLLM_LORA_RESOLVER_CACHE_DIR``
and looks no further: ``../elsewhere/adapter`` and ``/elsewhere/adapter`` leave the folder, and so does a symbolic link
inside it. With this patch such a name is an adapter that does not exist: the request is answered with 404.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.patching import VLLMPatch, wrap

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_LOG: Final = logging.getLogger("vllm.graft")


class LoraPathGuard(
    VLLMPatch["vllm.plugins.lora_resolvers.filesystem_resolver:FilesystemResolver"],
    name="lora-path-guard",
    vllm=">=0.26,<0.33",
    why="the filesystem LoRA resolver joins the requested name to its folder unchecked, so a request can leave it",
    upstream="vLLM pull request #46287",
    remove_when="vLLM's resolver itself refuses names that leave its folder",
    processes={"frontend"},
):
    """Refuse to look up a name that leaves the resolver's folder."""

    @wrap
    async def resolve_lora(
        self, call: Callable[[str, str], Awaitable[Any]], base_model_name: str, lora_name: str
    ) -> Any:
        if not _lies_below(self.lora_cache_dir, lora_name):
            _LOG.warning(
                "vllm-graft: lora-path-guard: the adapter %.200r lies outside of %s and is not looked up",
                lora_name,
                self.lora_cache_dir,
            )
            return None
        return await call(base_model_name, lora_name)


def _lies_below(folder: str, name: str) -> bool:
    """Return whether a name leads into the folder, once every link and every ``..`` on the way is followed."""
    # os.path.join drops everything before an absolute part.
    if os.path.isabs(name):
        return False
    root = os.path.realpath(folder)
    try:
        return os.path.commonpath((root, os.path.realpath(os.path.join(root, name)))) == root
    except ValueError:
        # A NUL byte or an unpaired surrogate: not a file name.
        return False
