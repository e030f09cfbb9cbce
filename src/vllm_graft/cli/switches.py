"""What turns vllm-graft off in this environment, whatever the configuration says."""

from __future__ import annotations

import os

from vllm_graft.boot import DISABLE_VARIABLE, disabled
from vllm_graft.findings import Finding

PLUGINS_VARIABLE = "VLLM_PLUGINS"


def plugins_fault() -> str:
    """Say how ``VLLM_PLUGINS`` keeps vLLM from loading vllm-graft; empty where it does not."""
    listed = os.environ.get(PLUGINS_VARIABLE)
    if listed is None or "graft" in listed.split(","):
        return ""
    spaced = "graft" in [name.strip() for name in listed.split(",")]
    what = "lists graft with blanks around it, which vLLM does not strip" if spaced else "does not list graft"
    return f"VLLM_PLUGINS={listed!r} {what}"


def switched_off(*, planned: bool) -> list[Finding]:
    """Findings for what turns vllm-graft off here; an error where something is planned and nobody said so openly."""
    found = []
    if disabled():
        what = "is set: vLLM runs as it is, without anything that is planned"
        found.append(Finding("P011", "warning", DISABLE_VARIABLE, what, "", f"unset {DISABLE_VARIABLE}"))
    elif fault := plugins_fault():
        what = f"{fault}: vLLM does not load vllm-graft, and nothing that is planned is active"
        fix = f"add graft to it without blanks, or unset it; {DISABLE_VARIABLE}=1 says that the stock server is meant"
        found.append(Finding("P011", "error" if planned else "warning", PLUGINS_VARIABLE, what, "", fix))
    return found
