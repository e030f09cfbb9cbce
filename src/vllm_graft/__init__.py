"""vllm-graft: extend vLLM without forking it.

A guided tour, in the order an author meets the names:

- ``VLLMPatch``, ``wrap``, ``replace``, ``add``, ``min_vllm_version``: declare a surgical change to a vLLM class
- ``PatchManager``: register and apply patches by hand
- ``SamplingStrategy``, ``Truncation``, ``Sampler``, ``AdmissionQueue``, ``SchedulingPolicy``, ``KVPolicy``,
  ``AttentionKernel``, ``ModelPlugin``, ``MoeRouter``, ``ExpertBalancer``, ``StatSink``: the contracts of the extension
  points that are bound; ``Key`` declares what a request may carry, ``Window`` what a layer keeps;
  ``vllm_graft.contracts`` has what they are given
- ``Plan``, ``resolve``: what is to be active for a model, and why
- ``Finding``, ``GraftError``: what tools report, and the base of all errors

Every name is loaded on first use: the package is imported in each vLLM process, and its import costs milliseconds.
"""

from __future__ import annotations

from vllm_graft.lazy import loader

__version__ = "0.1.0"

TYPE_CHECKING = False  # typing's own costs more to import than all of this file

if TYPE_CHECKING:
    from vllm_graft.contracts import (
        AdmissionQueue,
        AttentionKernel,
        ExpertBalancer,
        Key,
        KVPolicy,
        ModelPlugin,
        MoeRouter,
        Sampler,
        SamplerBase,
        SamplingStrategy,
        SchedulerBase,
        SchedulingPolicy,
        StatSink,
        Truncation,
        Window,
    )
    from vllm_graft.errors import GraftError
    from vllm_graft.findings import Finding
    from vllm_graft.patching import PatchManager, VLLMPatch, add, min_vllm_version, replace, wrap
    from vllm_graft.plan import Plan, resolve

__all__ = [
    "AdmissionQueue",
    "AttentionKernel",
    "ExpertBalancer",
    "Finding",
    "GraftError",
    "KVPolicy",
    "Key",
    "ModelPlugin",
    "MoeRouter",
    "PatchManager",
    "Plan",
    "Sampler",
    "SamplerBase",
    "SamplingStrategy",
    "SchedulerBase",
    "SchedulingPolicy",
    "StatSink",
    "Truncation",
    "VLLMPatch",
    "Window",
    "__version__",
    "add",
    "min_vllm_version",
    "replace",
    "resolve",
    "wrap",
]

_HOMES = {
    "AdmissionQueue": "contracts",
    "AttentionKernel": "contracts",
    "ExpertBalancer": "contracts",
    "Finding": "findings",
    "GraftError": "errors",
    "KVPolicy": "contracts",
    "Key": "contracts",
    "ModelPlugin": "contracts",
    "MoeRouter": "contracts",
    "PatchManager": "patching",
    "Plan": "plan",
    "Sampler": "contracts",
    "SamplerBase": "contracts",
    "SamplingStrategy": "contracts",
    "SchedulerBase": "contracts",
    "SchedulingPolicy": "contracts",
    "StatSink": "contracts",
    "Truncation": "contracts",
    "VLLMPatch": "patching",
    "Window": "contracts",
    "add": "patching",
    "min_vllm_version": "patching",
    "replace": "patching",
    "resolve": "plan",
    "wrap": "patching",
}


__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
