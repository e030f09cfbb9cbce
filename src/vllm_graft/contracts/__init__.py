"""What an author implements: one small class per extension point, none of which knows a vLLM version.

- ``AdmissionQueue``: decides which waiting request goes next
- ``SamplingStrategy``: changes the logits of the requests that ask for it
- ``StatSink``: is told of every finished request

Contracts of further points join as their bindings land; ``vllm-graft points`` shows which are bound.
"""

from vllm_graft.contracts.item import Item
from vllm_graft.contracts.sampling import Rows, SamplingStrategy
from vllm_graft.contracts.scheduling import AdmissionQueue, WaitingRequest
from vllm_graft.contracts.stats import BatchRecord, RequestRecord, StatSink

__all__ = [
    "AdmissionQueue",
    "BatchRecord",
    "Item",
    "RequestRecord",
    "Rows",
    "SamplingStrategy",
    "StatSink",
    "WaitingRequest",
]
