"""What an author implements: one small class per extension point, none of which knows a vLLM version.

- ``StatSink``: is told of every finished request

Contracts of further points join as their bindings land; ``vllm-graft points`` shows which are bound.
"""

from vllm_graft.contracts.item import Item
from vllm_graft.contracts.stats import BatchRecord, RequestRecord, StatSink

__all__ = ["BatchRecord", "Item", "RequestRecord", "StatSink"]
