"""The prompt of a request as token ids: invented ones are the same for the same name, and differ from name to name."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_graft.hashing import GAMMA, finalize_array

if TYPE_CHECKING:
    from vllm_graft.plugins.platforms.simulated.workload.request import Request


def prompt_of(request: Request, vocabulary: int) -> dict[str, Any]:
    """The prompt in the form that vLLM takes it."""
    if request.prompt is not None:
        return {"prompt": request.prompt}
    if request.prompt_token_ids is not None:
        return {"prompt_token_ids": list(request.prompt_token_ids)}
    count, prefix = request.prompt_tokens or 0, request.prefix
    if prefix is None:
        return {"prompt_token_ids": invented(f"request/{request.id}", count, vocabulary)}
    shared = invented(f"prefix/{prefix.name}", prefix.tokens, vocabulary)
    own = invented(f"request/{request.id}", count - prefix.tokens, vocabulary)
    return {"prompt_token_ids": shared + own}


def invented(name: str, count: int, vocabulary: int) -> list[int]:
    """Token ids that follow from a name; a longer list begins like a shorter one (the splitmix64 sequence)."""
    key = np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        words = key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
    ids: list[int] = (finalize_array(words) % np.uint64(vocabulary)).tolist()
    return ids
