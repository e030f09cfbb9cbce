"""The contracts that an author implements: one small class per extension point, none of which knows a vLLM version.

- ``AdmissionQueue``: decides which waiting request goes next; ``WaitingHeap`` keeps requests in order for it
- ``SchedulingPolicy``: decides each step which requests start and which are preempted
- ``SamplingStrategy``: changes the logits of the requests that ask for it; ``Truncation`` by a limit per row
- ``Sampler``: picks the tokens of the requests that ask for it
- ``KVPolicy``: decides which part of a request's KV cache stays
- ``AttentionKernel``: computes attention over the paged KV cache
- ``ExpertBalancer``: decides which expert sits in which slot
- ``ModelPlugin``: names a model class for vLLM to build
- ``MoeRouter``: chooses the experts of each token, in models that vLLM has
- ``StatSink``: receives every finished request
- ``ConfigError``: an item that cannot work as it is configured
- ``OptionError``: refuses the value of an option (``OptionValue``); ``nearest`` suggests a name in its message

``vllm_graft.contracts.kernels`` has building blocks for samplers: statistics of rows, truncation, copies to the device.

Contracts of further points join as their bindings land; ``vllm-graft points`` shows which are bound.
"""

from vllm_graft.contracts.attention import AttentionBatch, AttentionKernel, KVPolicy, LayerView, RequestBlocks, Window
from vllm_graft.contracts.balancing import ExpertBalancer, ExpertLoad
from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.models import ModelPlugin, ModelView
from vllm_graft.contracts.policy import KVState, RequestView, Schedule, SchedulerBase, SchedulingPolicy
from vllm_graft.contracts.request_keys import Key, KeyValue, Params
from vllm_graft.contracts.routing import MoeLayerView, MoeRouter
from vllm_graft.contracts.rows import History, PerSlot, Rows, ServedModel, Statistics
from vllm_graft.contracts.sampling import STAGES, Sampler, SamplerBase, SamplingStrategy, Truncation
from vllm_graft.contracts.scheduling import AdmissionQueue, Load, Refusal, WaitingHeap, WaitingRequest
from vllm_graft.contracts.stats import BatchRecord, RequestRecord, StatSink
from vllm_graft.errors import ConfigError, OptionError, nearest

__all__ = [
    "STAGES",
    "AdmissionQueue",
    "AttentionBatch",
    "AttentionKernel",
    "BatchRecord",
    "ConfigError",
    "ExpertBalancer",
    "ExpertLoad",
    "History",
    "Item",
    "KVPolicy",
    "KVState",
    "Key",
    "KeyValue",
    "LayerView",
    "Load",
    "ModelPlugin",
    "ModelView",
    "MoeLayerView",
    "MoeRouter",
    "OptionError",
    "OptionValue",
    "Params",
    "PerSlot",
    "Refusal",
    "RequestBlocks",
    "RequestRecord",
    "RequestView",
    "Rows",
    "Sampler",
    "SamplerBase",
    "SamplingStrategy",
    "Schedule",
    "SchedulerBase",
    "SchedulingPolicy",
    "ServedModel",
    "StatSink",
    "Statistics",
    "Truncation",
    "WaitingHeap",
    "WaitingRequest",
    "Window",
    "nearest",
]
