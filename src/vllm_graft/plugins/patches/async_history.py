"""``async-history``: logits processors of installed packages see the tokens that were really sampled.

With asynchronous scheduling the V1 model runner appends a placeholder, -1, to a request's output tokens, and fills in
the real token in the next step, right before logits processors run, if one of them is known to need it. Those given by
``--logits-processors`` are known; those found through the entry points ``vllm.logits_processors`` are not counted.
They see -1, -1, -1 and silently compute nonsense. With this patch they count.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.patching import VLLMPatch, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG: Final = logging.getLogger("vllm.graft")
# MinTokens, LogitBias and MinP.
_BUILT_IN: Final = "vllm.v1.sample.logits_processor."


class AsyncHistory(
    VLLMPatch["vllm.v1.worker.gpu_input_batch:InputBatch"],
    name="async-history",
    vllm=">=0.26,<0.33",
    why="under asynchronous scheduling, logits processors from entry points see -1 in place of every output token",
    upstream="vLLM issue #52461, pull request #52698: GPUModelRunner.__init__, logitsprocs_need_output_token_ids",
    remove_when="vLLM counts every logits processor it has loaded, not only those of --logits-processors",
    processes={"worker"},
):
    """Have a batch with any logits processor that is not vLLM's own keep its output tokens."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        _count_foreign(self)


def _count_foreign(batch: Any) -> None:
    # The attribute is read before it is set: if upstream has renamed it, that raises instead of doing nothing.
    if batch.logitsprocs_need_output_token_ids:
        return
    kinds = [type(processor) for processor in batch.logitsprocs.all]
    # Those that are built into vLLM read how many tokens there are, never which.
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if not kind.__module__.startswith(_BUILT_IN)]
    if names:
        batch.logitsprocs_need_output_token_ids = True
        _LOG.info("vllm-graft: async-history: the real output tokens are kept for %s", ", ".join(names))
