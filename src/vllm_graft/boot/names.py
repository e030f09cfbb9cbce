"""Our environment variables, made known to vLLM.

vLLM warns of unknown ``VLLM_*`` names, or refuses to start with ``--fail-on-environ-validation``; it copies the names
it knows to Ray workers; and it hashes their values into its compile key. So our names are registered with a constant
value, and one name that is never set stands for the patches: its value is their hash, which keeps a graph compiled
with a patch from being loaded without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

CARRIED: Final = (
    "GRAFT_CONFIG",
    "GRAFT_DISABLE",
    "GRAFT_ON_DRIFT",
    "GRAFT_PLAN",
    "GRAFT_RUN",
    "GRAFT_SIMULATE",
    "GRAFT_SIMULATED_ACCEPTANCE",
    "GRAFT_SIMULATED_KV_BYTES",
    "GRAFT_SIMULATED_OUTPUT_TOKENS",
    "GRAFT_SIMULATED_SPEED",
    "GRAFT_STATE_DIR",
    "VLLM_CUSTOM_PATCHES",
)

PATCHSET: Final = "GRAFT_PATCHSET"
"""Never set in the environment: the name under which the hash of the patches enters vLLM's compile key."""


def make_known(patchset: Callable[[], str]) -> None:
    """Register our names with vLLM; ``patchset`` gives the hash of this server's patches."""
    from vllm import envs

    for name in CARRIED:
        envs.environment_variables.setdefault(name, _nothing)
    envs.environment_variables[PATCHSET] = patchset


def silence_warnings() -> None:
    """Where we are turned off: let vLLM know the one ``VLLM_*`` name that is ours, and nothing else."""
    from vllm import envs

    # A vLLM that keeps no such table has nobody to warn; it must start all the same.
    known = getattr(envs, "environment_variables", None)
    if known is not None:
        known.setdefault("VLLM_CUSTOM_PATCHES", _nothing)


def _nothing() -> None:
    return None
