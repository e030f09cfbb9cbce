"""Environment variables: ours, registered with vLLM, and those that turn us off.

vLLM warns of unknown ``VLLM_*`` names, or refuses to start with ``--fail-on-environ-validation``. It copies the names
that it knows to Ray workers, and hashes their values into its compile key. So our names are registered with a constant
value. One more name, which is never set, has the hash of the patches as its value: a graph that was compiled with a
patch is not loaded without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from vllm_graft.findings import Finding
from vllm_graft.switches import DISABLE_VARIABLE, PLUGINS_VARIABLE, allowed_plugins, disabled

CARRIED: Final = (
    "GRAFT_CHECK_KV",
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
"""The variables that our processes read, and that vLLM carries to its children."""

OWN: Final = (
    *CARRIED,
    "GRAFT_CACHE_DIR",
    "GRAFT_PATCHSET",
    "GRAFT_SIMULATED_DEVICES",
    "GRAFT_SMOLLM2_WHEEL",
)
"""Every variable that vllm-graft reads."""

PATCHSET: Final = "GRAFT_PATCHSET"
"""Never set in the environment: the name under which the hash of the patches enters vLLM's compile key."""


def register_variables(patchset: Callable[[], str]) -> None:
    """Register our names with vLLM; ``patchset`` returns the hash of this server's patches."""
    from vllm import envs

    for name in CARRIED:
        envs.environment_variables.setdefault(name, lambda: None)
    envs.environment_variables[PATCHSET] = patchset


def silence_warnings() -> None:
    """Register our one ``VLLM_*`` name, which vLLM would warn about, if the package is turned off."""
    from vllm import envs

    # A vLLM without that table warns of nothing; it must start anyway.
    known = getattr(envs, "environment_variables", None)
    if known is not None:
        known.setdefault("VLLM_CUSTOM_PATCHES", lambda: None)


def plugins_fault() -> str:
    """Return how ``VLLM_PLUGINS`` keeps vLLM from loading vllm-graft; empty if it does not."""
    allowed = allowed_plugins()
    if allowed is None or "graft" in allowed:
        return ""
    spaced = "graft" in [name.strip() for name in allowed]
    what = "lists graft with blanks around it, which vLLM does not strip" if spaced else "does not list graft"
    return f"VLLM_PLUGINS={','.join(allowed)!r} {what}"


def switched_off(*, planned: bool) -> list[Finding]:
    """Return findings for variables that turn vllm-graft off; an error if something is planned and lost by accident."""
    if disabled():
        what = "is set: vLLM runs unmodified, and nothing in the plan is active"
        return [Finding("P011", "warning", DISABLE_VARIABLE, what, "", f"unset {DISABLE_VARIABLE}")]
    if fault := plugins_fault():
        what = f"{fault}: vLLM does not load vllm-graft, and nothing that is planned is active"
        fix = f"add graft to it without blanks, or unset it; {DISABLE_VARIABLE}=1 asks for the stock server"
        return [Finding("P011", "error" if planned else "warning", PLUGINS_VARIABLE, what, "", fix)]
    return []
