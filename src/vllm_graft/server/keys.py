"""The server's API keys: our routes ask for the same ones that vLLM's do.

vLLM checks keys on paths under ``/v1`` and a few others, ours are not among them, so they check for themselves.
"""

from __future__ import annotations

import hmac
from argparse import Namespace
from collections.abc import Iterable


def server_keys(args: Namespace) -> list[str]:
    """The keys this server was started with; empty where it asks for none."""
    from vllm import envs

    given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
    keys = [given] if isinstance(given, str) else given
    return [key for key in keys if key]


def allowed(header: str | None, keys: Iterable[str]) -> bool:
    """Whether an ``Authorization`` header carries one of the keys; compared in constant time."""
    scheme, _, token = (header or "").partition(" ")
    found = False
    asked = False
    for key in keys:
        asked = True
        found |= hmac.compare_digest(token.strip().encode(), key.encode())
    return not asked or (scheme.lower() == "bearer" and found)
