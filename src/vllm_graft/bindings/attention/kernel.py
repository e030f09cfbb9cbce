"""An ``AttentionKernel`` as a vLLM backend: its description, its metadata builder and its implementation.

The three classes are made for the class of a kernel, because vLLM asks them on the class. They fulfil the interfaces of
0.26 to 0.32: what one release lacks is an attribute too many there, never a missing one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_graft.bindings.attention.layer_budget import LayerBudget
from vllm_graft.contracts import AttentionBatch, AttentionKernel
from vllm_graft.errors import GraftError, ServingError
from vllm_graft.ledger import Ledger, Meter
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.plan.catalogue import load
from vllm_graft.points import point

if TYPE_CHECKING:
    import torch
    from vllm.v1.attention.backend import AttentionBackend


@dataclass(slots=True)
class KernelMetadata:
    """The metadata that the layers of a step are given. vLLM reads none of it."""

    batch: AttentionBatch
    tokens: int
    """The tokens of the step; the tensors of a captured graph are longer."""


class LayerKernel:
    """The kernel of one layer: its calls metered, and an exception named before it ends the engine.

    There is nothing to fall back to: what the kernel stored is in its own order, and vLLM's CPU kernel packs keys in an
    order of its own besides.
    """

    def __init__(self, kernel: AttentionKernel, item: PlanItem, layer: str, ledger: Ledger) -> None:
        self.kernel = kernel
        self.layer = layer
        self._item = item
        self._ledger = ledger
        self.budget: LayerBudget | None = None
        """Times the layer in decode steps; None until the layer is known."""
        # On a GPU this is the time of the launches, and of nothing in a step that replays a graph: LayerBudget has the
        # budget, which depends on what a step reads.
        self._forward = ledger.hook(item.name, "forward")
        self._store = ledger.hook(item.name, "store", point(item.point).budget_us)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
        output: torch.Tensor,
    ) -> None:
        """Compute the attention of a step's tokens into ``output``."""
        made = self._run(self._forward, self._attend, query, key, value, kv_cache, batch)
        if problem := wrong_output(made, query):
            raise self._failure(problem)
        output.copy_(made)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> Any:
        # A step with prompts is bound by arithmetic, and its bytes say nothing of its time.
        if self.budget is None or batch.max_query != 1:
            return self.kernel.forward(query, key, value, kv_cache, batch)
        return self.budget.run(
            lambda: self.kernel.forward(query, key, value, kv_cache, batch),
            query.device,
            lambda: self._bytes(query, kv_cache, batch),
        )

    def _bytes(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the bytes that a decode step reads and writes in this layer, on its device."""
        view = self.kernel.layer
        lengths = batch.lengths if view.window is None else batch.lengths.clamp(max=view.window)
        token = 2 * view.kv_heads * view.head_size * kv_cache.element_size()
        return lengths.sum() * token + 2 * query.numel() * query.element_size()

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Store a step's keys and values."""
        self._run(self._store, self.kernel.store, key, value, kv_cache, slots)

    def _run(self, meter: Meter, call: Callable[..., Any], *args: object) -> Any:
        started = time.perf_counter_ns()
        try:
            made = call(*args)
        except BaseException as error:
            if raised_by_signal(error):
                raise
            meter.error()
            raise self._failure(reason_of(error)) from error
        finally:
            meter.count(time.perf_counter_ns() - started)
        return made

    def _failure(self, reason: str) -> ServingError:
        self._ledger.note_error(self._item.name, f"failed in {self.layer}, which ends the engine: {reason}")
        return ServingError(
            f"attention {self._item.name!r} (from {self._item.origin}) failed, and no other kernel can read its KV "
            f"cache: {reason}",
            where=self.layer,
            fix="fix the kernel or remove it from the plan, and restart the server",
        )


def wrong_output(made: object, query: torch.Tensor) -> str:
    """Return why this is not an output of attention for a query; empty if it is one."""
    import torch

    if not isinstance(made, torch.Tensor):
        return f"forward() returned {'nothing' if made is None else type(made).__name__} instead of a tensor"
    if made.shape != query.shape:
        return f"forward() returned the shape {list(made.shape)} for a query of {list(query.shape)}"
    if made.device != query.device:
        return f"forward() returned a tensor on {made.device} for a query on {query.device}"
    return ""


def kernel_class(item: PlanItem) -> type[AttentionKernel] | None:
    """Return the class of a planned item if that is a kernel."""
    try:
        kind = load(item.target, item.name, item.package)
    except GraftError:
        # Instantiating it records why.
        return None
    return kind if issubclass(kind, AttentionKernel) else None


def kernel_backend(kind: type[AttentionKernel], on_builder: Callable[[Any, list[str]], None]) -> type[AttentionBackend]:
    """Make the backend of a kernel's class, for all of its layers.

    ``on_builder`` is called with the KV-cache spec and the names of the layers that a builder is made for.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf

    # vLLM looks the name up among its own. CUSTOM is a member of every release, and free unless something registers it;
    # what is registered under it plays no part, because the layer is given this class itself.
    name = "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"
    builder, implementation = _kernel_builder(kind, on_builder), _kernel_implementation()

    class KernelBackend(AttentionBackend):
        """Tells vLLM the block sizes that a kernel serves; the other needs of a layer were compared before."""

        supported_dtypes = [getattr(torch, each) for each in kind.dtypes]  # noqa: RUF012 - as vLLM declares it
        supported_kv_cache_dtypes = ["auto", *kind.dtypes]  # noqa: RUF012
        forward_includes_kv_cache_update = False

        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_impl_cls() -> type:
            return implementation

        @staticmethod
        def get_builder_cls() -> type:
            return builder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
            # Without the argument up to 0.30.
            return [MultipleOf(kind.block_multiple)]

        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return list(kind.head_sizes)

        @classmethod
        def supports_sliding_window(cls) -> bool:
            return kind.windows

        # Up to 0.28. Later the spec gives the same shape, in any order of memory while a backend asks for none.
        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return num_blocks, num_kv_heads, block_size, 2 * head_size

        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
            # Blocks outermost, so that vLLM may pad pages and keep the layers of a block together.
            return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    # vLLM groups layers by the backend's module and name.
    KernelBackend.__name__ = KernelBackend.__qualname__ = f"{kind.__name__}Backend"
    return KernelBackend


def _kernel_builder(kind: type[AttentionKernel], on_builder: Callable[[Any, list[str]], None]) -> type:
    from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

    graphs = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if kind.cuda_graphs else AttentionCGSupport.NEVER

    class KernelBuilder(AttentionMetadataBuilder[Any]):
        """Reads an ``AttentionBatch`` off the metadata that vLLM makes for all backends."""

        _cudagraph_support = graphs

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            on_builder(kv_cache_spec, layer_names)

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KernelMetadata:
            common = common_attn_metadata
            if common.causal is not True:
                # A tensor with an answer for each request from 0.32 on.
                raise ServingError(
                    "vLLM asks for attention to later tokens, which kernels do not serve",
                    where=self.layer_names[0],
                    fix=f"remove {kind.__name__} from the plan for this model, or leave its drafter out",
                )
            return KernelMetadata(
                AttentionBatch(
                    starts=common.query_start_loc[: common.num_reqs + 1],
                    lengths=common.seq_lens[: common.num_reqs],
                    blocks=common.block_table_tensor[: common.num_reqs],
                    max_query=common.max_query_len,
                    max_length=common.max_seq_len,
                ),
                common.num_actual_tokens,
            )

    KernelBuilder.__name__ = KernelBuilder.__qualname__ = f"{kind.__name__}Builder"
    return KernelBuilder


@functools.cache
def _kernel_implementation() -> type:
    from vllm.v1.attention.backend import AttentionImpl

    class KernelImplementation(AttentionImpl[Any]):
        """Calls the kernel of one layer, which comes with the arguments that the layer passes on."""

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            alibi_slopes: object = None,
            sliding_window: int | None = None,
            kv_cache_dtype: str = "auto",
            *args: object,
            kernel: LayerKernel,
        ) -> None:
            self.num_heads = num_heads
            self.head_size = head_size
            self.scale = kernel.kernel.scale = float(scale)
            self.num_kv_heads = num_kv_heads or num_heads
            self.sliding_window = sliding_window
            self.kv_cache_dtype = kv_cache_dtype
            self.kernel = kernel

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: KernelMetadata | None,
            output: torch.Tensor,
            output_scale: object = None,
            output_block_scale: object = None,
        ) -> torch.Tensor:
            if attn_metadata is None:
                # A run without a KV cache, in which vLLM measures memory or compiles.
                return output.fill_(0)
            batch, tokens = attn_metadata.batch, attn_metadata.tokens
            self.kernel.forward(query[:tokens], key[:tokens], value[:tokens], kv_cache, batch, output[:tokens])
            return output

        def do_kv_cache_update(
            self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            if kv_cache.numel():
                tokens = len(slot_mapping)
                self.kernel.store(key[:tokens], value[:tokens], kv_cache, slot_mapping)

    return KernelImplementation
