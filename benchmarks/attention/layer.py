"""One attention layer of a decode step: compacted block tables beside the stock kernels, and the memory floor.

Shapes: bf16, 32 query heads, 8 KV heads of 128, blocks of 16 tokens. Each way is captured in a CUDA graph and replayed;
the time is the median of five rounds. Tables are random pages of one cache that is larger than the L2 cache. "ours" is
the stock FlashAttention 3 kernel on the table that our kernel compacts, and a 32nd of the time to compact it, since 32
layers share it; "table" is that time in full. The floor is the bytes of the window by the bandwidth of a copy, measured
in the same run. Results are compared with a float64 reference, by the largest difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.triton_kernels import compact_single_tokens

HEADS, KV_HEADS, SIZE, BLOCK, LAYERS = 32, 8, 128, 16, 32
WINDOW, SINKS = 4096, 64
SHAPES = [
    (1, 8192), (1, 32768), (1, 131072), (8, 32768), (8, 131072), (32, 8192), (32, 32768), (64, 8192), (64, 32768),
    (128, 8192), (256, 8192),
]  # fmt: skip
DEVICE = "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; it compiles for a minute")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    rows = [measure(batch, context, bandwidth, flex=args.flex) for batch, context in SHAPES]
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print(
            "| "
            + " | ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
            + " |"
        )
    if args.json:
        facts = {"device": torch.cuda.get_device_name(), "copy_tb_s": bandwidth / 1e12, "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GB."""
    source = torch.zeros(1 << 29, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    microseconds = replay(lambda: target.copy_(source), calls=10)
    return 2 * source.numel() * source.element_size() / (microseconds / 1e6)


def replay(call: Callable[[], object], calls: int = 50) -> float:
    """Microseconds of a call on the device, replayed from a graph: the median of five rounds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return statistics.median(times)


class Layer:
    """Queries, cache and tables of a batch of equally long contexts."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        pages = -(-context // BLOCK)
        # Rows may share pages far apart: the cache is limited by memory, and must only be larger than L2.
        self.cache = torch.randn((min(batch * pages, 400_000), BLOCK, KV_HEADS, 2 * SIZE), device=DEVICE).bfloat16()
        order = torch.randperm(len(self.cache), device=DEVICE)
        at = torch.arange(batch * pages, device=DEVICE) % len(self.cache)
        self.table = order[at].view(batch, pages).int()
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
        self.query = torch.randn((batch, HEADS, SIZE), device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.query)

    def flash(self, table: torch.Tensor, lengths: torch.Tensor, longest: int, window: int = 0) -> Callable[[], object]:
        """FlashAttention 3 as vLLM calls it: the work planned once per step, outside of the layer."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        key, value = self.cache.split(SIZE, dim=-1)
        sides = [window - 1, 0] if window else [-1, -1]
        plan = get_scheduler_metadata(
            batch_size=self.batch, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
            headdim=SIZE, cache_seqlens=lengths, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts, page_size=BLOCK,
            causal=True, window_size=tuple(sides), num_splits=32,
        )  # fmt: skip
        return lambda: flash_attn_varlen_func(
            q=self.query, k=key, v=value, out=self.out, cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=longest, softmax_scale=SIZE**-0.5, causal=True, window_size=sides, block_table=table,
            scheduler_metadata=plan, num_splits=32, fa_version=3,
        )  # fmt: skip

    def triton(self, table: torch.Tensor, lengths: torch.Tensor, longest: int, window: int) -> Callable[[], object]:
        """vLLM's Triton kernel with its own choice of segments."""
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        key, value = self.cache.split(SIZE, dim=-1)
        segments = 16
        scratch = torch.empty((self.batch, HEADS, segments, SIZE), device=DEVICE)
        most, total = (torch.empty((self.batch, HEADS, segments), device=DEVICE) for _ in range(2))
        return lambda: unified_attention(
            q=self.query, k=key, v=value, out=self.out, cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=longest, softmax_scale=SIZE**-0.5, causal=True, window_size=(window - 1, 0), block_table=table,
            softcap=0, q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=128 // KV_HEADS,
            num_par_softmax_segments=segments, softmax_segm_output=scratch, softmax_segm_max=most,
            softmax_segm_expsum=total,
        )  # fmt: skip

    def flex(self, window: int) -> Callable[[], object]:
        """FlexAttention with a mask of the window, over a cache that is not paged."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        context = self.context
        shape = (self.batch, KV_HEADS, context, SIZE)
        key, value = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        query = self.query[:, :, None]

        def seen(_b: object, _h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return k > q + context - 1 - window

        mask = create_block_mask(seen, None, None, 1, context, device=DEVICE)
        return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True)

    def reference(self, tokens: torch.Tensor, row: int = 0) -> torch.Tensor:
        """Attention of one row over these tokens of its context, in float64."""
        pages = self.cache[self.table[row].long()].view(-1, KV_HEADS, 2 * SIZE)[tokens].double()
        key, value = pages.split(SIZE, dim=-1)
        query = self.query[row].double().view(KV_HEADS, HEADS // KV_HEADS, SIZE)
        scores = torch.einsum("hgd,thd->hgt", query, key) * SIZE**-0.5
        return torch.einsum("hgt,thd->hgd", scores.softmax(-1), value).reshape(HEADS, SIZE)


def measure(batch: int, context: int, bandwidth: float, *, flex: bool) -> dict[str, float | int | str]:
    """One row of the table."""
    layer = Layer(batch, context)
    facts: dict[str, float | int | str] = {"batch": batch, "context": context}
    facts["FA3 full"] = replay(layer.flash(layer.table, layer.lengths, context))
    facts["FA3 window"] = replay(layer.flash(layer.table, layer.lengths, context, WINDOW))
    facts["Triton window"] = replay(layer.triton(layer.table, layer.lengths, context, WINDOW))
    if flex:
        try:
            facts["Flex window"] = replay(layer.flex(WINDOW))
        except torch.OutOfMemoryError:
            facts["Flex window"] = "no memory"
    for name, shape in (("compact-window", None), ("sink-window", WindowShape.fit(SINKS, WINDOW - SINKS, BLOCK))):
        most = shape.most if shape else WINDOW + BLOCK - 1
        table = torch.zeros((batch, -(-most // BLOCK)), dtype=torch.int32, device=DEVICE)
        lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        building = (layer.lengths, layer.table, lengths, table, BLOCK, shape, WINDOW)
        facts["table"] = replay(lambda building=building: compact_single_tokens(*building))
        attend = layer.flash(table, lengths, most, 0 if shape else WINDOW)
        facts[name] = replay(attend) + facts["table"] / LAYERS
        facts[f"error {name}"] = f"{error(layer, shape):.1e}"
    facts["floor"] = 1e6 * batch * min(context, WINDOW) * KV_HEADS * 2 * SIZE * 2 / bandwidth
    return facts


def error(layer: Layer, shape: WindowShape | None) -> float:
    """The largest difference of the first row from the reference, after a replay of this way."""
    at = torch.arange(layer.context, device=DEVICE)
    last = layer.context - 1
    if shape is None:
        seen = at > last - WINDOW
    else:
        seen = (at < shape.first) | (at >= shape.start(last))
    return float((layer.out[0].double() - layer.reference(at[seen])).abs().max())


if __name__ == "__main__":
    main()
