"""A debug check that no freed KV block is read: such blocks are filled with NaN, and attention is searched for it.

``GRAFT_CHECK_KV=1`` turns it on for servers with a planned KV policy. Engine core sends the blocks that are free, and
not in the prefix cache, with each step's schedule; the worker fills them before the step, and empties those that were
handed out again. A layer whose output has NaN though its input has none ends the engine with an error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.errors import ServingError

if TYPE_CHECKING:
    import numpy as np
    import torch

VARIABLE: Final = "GRAFT_CHECK_KV"
"""The environment variable that turns the check on."""

FREE: Final = "graft_free_blocks"
"""The attribute of a step's schedule with the numbers of the blocks that hold nothing."""


def checked() -> bool:
    """Return whether the check is on."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def attach_free(pool: Any, output: Any) -> None:
    """Attach the blocks that hold nothing after a step was scheduled."""
    import numpy as np

    free = [block.block_id for block in pool.blocks if not block.ref_cnt and not block.block_hash and not block.is_null]
    setattr(output, FREE, np.array(free, dtype=np.int64))


class FreedBlocks:
    """The blocks of a worker that are filled with NaN.

    ``on_fill`` is called with the number of blocks filled since the start. With ``null`` the null block, which stands
    in block tables where a block is gone, is one of them.
    """

    def __init__(self, blocks: int, null: bool, on_fill: Callable[[int], None]) -> None:
        import numpy as np

        self._filled = np.zeros(blocks, dtype=bool)
        self._null = null
        self._on_fill = on_fill
        self._count = 0

    def fill(self, caches: list[torch.Tensor], free: np.ndarray) -> None:
        """Fill the blocks that were freed since the last step, and empty those that were handed out again."""
        import numpy as np
        import torch

        now = np.zeros_like(self._filled)
        now[free] = True
        now[0] = self._null
        freed, taken = np.flatnonzero(now & ~self._filled), np.flatnonzero(self._filled & ~now)
        self._filled = now
        if self._null:
            # Padding is stored there.
            freed = np.union1d(freed, [0])
        for cache in caches:
            if not isinstance(cache, torch.Tensor) or not cache.is_floating_point():
                # The states of a Mamba layer, of which a policy frees none.
                continue
            if len(cache) != len(now):
                raise ServingError(
                    f"a KV cache of the shape {list(cache.shape)} does not begin with its {len(now)} blocks",
                    where=VARIABLE,
                    fix="turn the check off for this backend",
                )
            cache[freed.tolist()] = float("nan")
            cache[taken.tolist()] = 0.0
        self._count += len(freed)
        self._on_fill(self._count)


def search_output(layer: Any) -> None:
    """Have a layer raise when its output has NaN but its input does not."""
    attend, name = layer.impl.forward, layer.layer_name

    def forward(
        layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = attend(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        if attn_metadata is not None:
            tokens = attn_metadata.num_actual_tokens
            output = kwargs["output"] if "output" in kwargs else args[0]
            if _has_nan(output[:tokens]) and not (_has_nan(query[:tokens]) or _has_nan(value[:tokens])):
                raise ServingError(
                    "its output has NaN but its input does not: it has read a KV block that is free",
                    where=name,
                    fix=f"report it with the plan and the requests; {VARIABLE}=0 turns the check off",
                )
        return result

    layer.impl.forward = forward


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().any())


def unchecked(config: Any) -> str:
    """Return why an engine cannot be checked; empty if it can."""
    if not config.model_config.enforce_eager:
        return f"{VARIABLE} looks at what layers compute, which a CUDA graph does not allow; start with --enforce-eager"
    return ""
