"""LoRA resolvers: vLLM's own two, with what each needs, and those of other packages."""

from __future__ import annotations

from typing import Final

from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import Entry

FILESYSTEM: Final = "lora_filesystem_resolver"
HUB: Final = "lora_hf_hub_resolver"

SOURCES: Final = {FILESYSTEM: "VLLM_LORA_RESOLVER_CACHE_DIR", HUB: "VLLM_LORA_RESOLVER_HF_REPO_LIST"}
"""The variable that says where each of vLLM's own takes adapters from."""

UPDATING: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Without it no resolver is ever asked."""


def others(facts: Facts) -> list[Entry]:
    """General plugins of other packages that are loaded and whose module speaks of vLLM's registry of resolvers."""
    return [
        entry
        for entry in facts.in_group("vllm.general_plugins")
        if facts.loads(entry)
        and entry.module.partition(".")[0] not in ("vllm", "vllm_graft")
        and facts.reading.mentions(entry, "LoRAResolverRegistry")
    ]


def active(facts: Facts) -> list[str]:
    """The resolvers that will be registered, by the names of their plugins."""
    own = [name for name, source in SOURCES.items() if facts.environ.get(source) and is_let_in(facts, name)]
    return [*own, *(entry.name for entry in others(facts))]


def is_let_in(facts: Facts, name: str) -> bool:
    """Whether ``VLLM_PLUGINS`` lets one of vLLM's own in; the one that downloads wants to be named."""
    return name in facts.allowed if facts.allowed is not None else name != HUB
