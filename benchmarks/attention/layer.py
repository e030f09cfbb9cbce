"""One attention layer of a decode step: compacted block tables beside the stock kernels, and the memory floor.

    PYTHONPATH=src:SITE python -m benchmarks.attention layer [--json FILE] [--flex] [--variants] [--shapes 64x8192]

Shapes: bf16, 32 query heads, 8 KV heads of 128, blocks of 16 tokens, a window of 4,096. Tables are random pages of one
cache. Each way is captured in a CUDA graph; the graphs are replayed in turn, so that all meet the same clocks, and a
time is the median of seven rounds. Ours have a 32nd of the time to build their tables, since 32 layers share them.

- FA3 full, FA3 window, Triton window: the stock kernels as vLLM calls them, on the whole block table
- Flex: compiled FlexAttention with the mask of `sink-window`, over a gathered cache (`--flex`); torch 2.11 does
  not compile it for the shapes with 2^31 numbers in their keys
- compact-window: FlashAttention 3 over a table of the window's tokens, a page for each
- sink-window: FlashAttention 3 over the compacted block table
- floor: the bytes of the window by the bandwidth of a copy in the same run
- goal: what a window of 4,096 tokens may take at batch 1, 64 and 256
- best stock: the fastest of the stock windows; a way of ours is marked where it takes longer

`--variants` tries other ways to attend to exactly the model's window, and other splits of `sink-window`. Results are
compared with a float64 reference, by the largest difference.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.triton_kernels import compact_single_tokens, list_tokens

HEADS, KV_HEADS, SIZE, BLOCK, LAYERS = 32, 8, 128, 16, 32
WINDOW, SINKS, SPLITS = 4096, 64, 32
SHAPES = "1x8192,1x32768,1x131072,8x32768,8x131072,32x8192,32x32768,64x8192,64x32768,128x8192,256x8192"
GOALS = {1: 13.7, 64: 258.0, 256: 1000.0}
"""Microseconds by batch, for a window of 4,096 tokens."""
STOCK = ("FA3 window", "Triton window", "Flex")
OURS = ("compact-window", "sink-window")
DEVICE = "cuda"

Call = Callable[[], object]
Facts = dict[str, float | int | str]


@dataclass
class Way:
    """One way to compute the layer, and the tokens that its queries see."""

    attend: Call
    seen: torch.Tensor
    build: Call | None = None
    """Makes the table, once for all layers of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; it compiles anew for each shape")
    parser.add_argument("--variants", action="store_true", help="other ways to attend to the model's own window too")
    parser.add_argument("--shapes", default=SHAPES, help="batch x context, separated by commas")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[Facts] = []
    for shape in args.shapes.split(","):
        batch, _, context = shape.partition("x")
        rows.append(measure(int(batch), int(context), bandwidth, flex=args.flex, variants=args.variants))
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            facts = {"device": torch.cuda.get_device_name(), "copy_tb_s": bandwidth / 1e12, "rows": rows}
            args.json.write_text(json.dumps(facts, indent=1) + "\n")
    print_table(rows)


def print_table(rows: list[Facts]) -> None:
    names = [name for name in max(rows, key=len) if not name.startswith("error")]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        values = [row.get(name, "") for name in names]
        cells = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
        print("| " + " | ".join(cells) + " |")


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GB."""
    source = torch.zeros(1 << 29, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    # A kernel: a graph leaves plain copies to the copy engines, which are slower.
    microseconds = replay({"copy": lambda: torch.neg(source, out=target)}, calls=10)["copy"]
    return 2 * source.numel() * source.element_size() / (microseconds / 1e6)


def replay(ways: Mapping[str, Call], calls: int = 50) -> dict[str, float]:
    """Microseconds of each call on the device, replayed from graphs in turn: the median of seven rounds."""
    graphs = {name: capture(call) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(7):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # Not counted: what another way has left in the caches and in the queue.
            graph.replay()
            begin.record()
            for _ in range(calls):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def capture(call: Call) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class Layer:
    """Queries, cache and tables of a batch of equally long contexts."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        pages = -(-context // BLOCK)
        # Rows may share pages far apart: the cache is limited by memory, and must only be larger than L2.
        shape = (min(batch * pages, 400_000), BLOCK, KV_HEADS, 2 * SIZE)
        self.cache = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()
        order = torch.randperm(len(self.cache), device=DEVICE)
        at = torch.arange(batch * pages, device=DEVICE) % len(self.cache)
        self.table = order[at].view(batch, pages).int()
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
        self.query = torch.randn((batch, HEADS, SIZE), device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.query)
        self.position = torch.arange(context, device=DEVICE)
        self.in_window = self.position >= context - WINDOW
        self.shape = WindowShape.fit(SINKS, WINDOW - SINKS, BLOCK)
        self.in_sink_window = (self.position < self.shape.first) | (self.position >= self.shape.start(context - 1))

    def flash(
        self,
        table: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        window: int = 0,
        *,
        page: int = BLOCK,
        splits: int = SPLITS,
        planned: bool = True,
        skipped: torch.Tensor | None = None,
    ) -> Call:
        """FlashAttention 3 as vLLM calls it, its work planned once per step outside of the layer.

        ``page`` is 1 for a table of tokens. ``skipped`` is how many tokens of the first block each row does not see.
        """
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        key, value = self.cache.view(-1, page, KV_HEADS, 2 * SIZE).split(SIZE, dim=-1)
        sides = [window - 1, 0] if window else [-1, -1]
        plan = get_scheduler_metadata(
            batch_size=self.batch, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=HEADS, num_heads_kv=KV_HEADS,
            headdim=SIZE, cache_seqlens=lengths, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts, page_size=page,
            causal=True, window_size=tuple(sides), num_splits=splits, cache_leftpad=skipped,
        ) if planned else None  # fmt: skip
        if skipped is not None:
            # vLLM's own function does not hand it on.
            return lambda: torch.ops._vllm_fa3_C.fwd(
                self.query, key, value, None, None, None, self.out, self.starts, None, None, None, lengths, 1, longest,
                table, None, skipped, None, None, None, None, None, None, SIZE**-0.5, True, *sides, 0.0, True, plan,
                splits, None, 0, None, 1, 0, None,
            )  # fmt: skip
        return lambda: flash_attn_varlen_func(
            q=self.query, k=key, v=value, out=self.out, cu_seqlens_q=self.starts, max_seqlen_q=1, seqused_k=lengths,
            max_seqlen_k=longest, softmax_scale=SIZE**-0.5, causal=True, window_size=sides, block_table=table,
            scheduler_metadata=plan, num_splits=splits, fa_version=3,
        )  # fmt: skip

    def triton(self, table: torch.Tensor, lengths: torch.Tensor, longest: int, window: int) -> Call:
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

    def flex(self) -> Call:
        """FlexAttention with the mask of ``sink-window``, over the cache of each row gathered in order."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Each shape is compiled for itself, and dynamo compiles a function eight times at most.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        key, value = (
            self.cache[..., half][self.table.long()].flatten(1, 2)[:, : self.context].transpose(1, 2).contiguous()
            for half in (slice(SIZE), slice(SIZE, None))
        )
        query, first, start = self.query[:, :, None], self.shape.first, self.shape.start(self.context - 1)

        def seen(_b: object, _h: object, _q: object, k: torch.Tensor) -> torch.Tensor:
            return (k < first) | (k >= start)

        mask = create_block_mask(seen, None, None, 1, self.context, device=DEVICE)
        return lambda: self.out.copy_(compiled(query, key, value, block_mask=mask, enable_gqa=True)[:, :, 0])

    def stock(self) -> dict[str, Way]:
        """Stock vLLM's kernels over the whole block table."""
        whole = (self.table, self.lengths, self.context)
        return {
            "FA3 full": Way(self.flash(*whole), torch.ones_like(self.in_window)),
            "FA3 window": Way(self.flash(*whole, WINDOW), self.in_window),
            "Triton window": Way(self.triton(*whole, WINDOW), self.in_window),
        }

    def sink_window(self) -> Way:
        table, lengths, build = self.compacted(self.shape)
        return Way(self.flash(table, lengths, self.shape.most), self.in_sink_window, build)

    def compact_window(self) -> Way:
        """The model's own window by a table of tokens; it is as wide as the window, so the kernel drops the window."""
        table, lengths, build = self.tokens()
        return Way(self.flash(table, lengths, WINDOW, WINDOW, page=1), self.in_window, build)

    def variants(self) -> dict[str, Way]:
        """Other ways to attend to the model's own window, and other numbers of splits for `sink-window`."""
        table, lengths, build = self.compacted(None)
        sink_table, sink_lengths, sink_build = self.compacted(self.shape)
        most = WINDOW + BLOCK - 1
        tokens, number, build_tokens = self.tokens()
        skipped = torch.full_like(lengths, max(0, self.context - WINDOW) % BLOCK)
        ways = {
            "blocks": lambda: self.flash(table, lengths, most, WINDOW),
            "blocks, 1 split": lambda: self.flash(table, lengths, most, WINDOW, splits=1),
            "blocks, own splits": lambda: self.flash(table, lengths, most, WINDOW, splits=0),
            "blocks, no plan": lambda: self.flash(table, lengths, most, WINDOW, planned=False),
            "blocks, skipped tokens": lambda: self.flash(table, lengths, most, skipped=skipped),
            "tokens, 1 split": lambda: self.flash(tokens, number, WINDOW, WINDOW, page=1, splits=1),
            "tokens, no plan": lambda: self.flash(tokens, number, WINDOW, WINDOW, page=1, planned=False),
        }
        seen = dict.fromkeys(ways, self.in_window)
        for splits in (0, 1, 4, 8, 12, 16, 24):
            for planned in (True, False):
                name = f"sink, {splits} splits{'' if planned else ', no plan'}"
                ways[name] = functools.partial(
                    self.flash, sink_table, sink_lengths, self.shape.most, splits=splits, planned=planned
                )
                seen[name] = self.in_sink_window
        found = {}
        for name, make in ways.items():
            if not (attend := tried(make, name)):
                continue
            builds = {"tokens": build_tokens, "blocks": build, "sink": sink_build}
            found[name] = Way(attend, seen[name], builds[name.partition(",")[0]])
        return found

    def compacted(self, shape: WindowShape | None) -> tuple[torch.Tensor, torch.Tensor, Call]:
        """The block tables and lengths of a window, and what makes them; made once already."""
        most = shape.most if shape else WINDOW + BLOCK - 1
        table = torch.zeros((self.batch, -(-most // BLOCK)), dtype=torch.int32, device=DEVICE)
        lengths = torch.zeros(self.batch, dtype=torch.int32, device=DEVICE)

        def build() -> None:
            compact_single_tokens(self.lengths, self.table, lengths, table, BLOCK, shape, WINDOW)

        build()
        return table, lengths, build

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, Call]:
        """The tables of the window's tokens and their lengths, and what makes them; made once already."""
        table = torch.zeros((self.batch, WINDOW), dtype=torch.int32, device=DEVICE)
        lengths = torch.zeros(self.batch, dtype=torch.int32, device=DEVICE)

        def build() -> None:
            list_tokens(self.lengths, self.table, lengths, table, BLOCK, WINDOW, BLOCK)

        build()
        return table, lengths, build

    def reference(self, seen: torch.Tensor, row: int) -> torch.Tensor:
        """Attention of one row over these tokens of its context, in float64."""
        pages = self.cache[self.table[row].long()].view(-1, KV_HEADS, 2 * SIZE)[: self.context][seen].double()
        key, value = pages.split(SIZE, dim=-1)
        query = self.query[row].double().view(KV_HEADS, HEADS // KV_HEADS, SIZE)
        scores = torch.einsum("hgd,thd->hgt", query, key) * SIZE**-0.5
        return torch.einsum("hgt,thd->hgd", scores.softmax(-1), value).reshape(HEADS, SIZE)

    def error(self, way: Way) -> float:
        """The largest difference of the first and the last row from the reference."""
        self.out.zero_()
        way.attend()
        rows = {0, self.batch - 1}
        return max(float((self.out[row].double() - self.reference(way.seen, row)).abs().max()) for row in rows)


def tried(make: Callable[[], Call], name: str) -> Call | None:
    """Return a way that has run once; None, with its error printed, for one that does not run in a shape."""
    try:
        attend = make()
        attend()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError) as failure:
        print(f"{name}: {failure}".splitlines()[0], flush=True)
        return None
    return attend


def measure(batch: int, context: int, bandwidth: float, *, flex: bool, variants: bool) -> Facts:
    """One row of the table."""
    layer = Layer(batch, context)
    ways = layer.stock()
    if flex and (attend := tried(layer.flex, "Flex")):
        ways["Flex"] = Way(attend, layer.in_sink_window)
    ways |= {"compact-window": layer.compact_window(), "sink-window": layer.sink_window()}
    if variants:
        ways |= layer.variants()
    errors = {name: layer.error(way) for name, way in ways.items()}
    times = replay({name: way.attend for name, way in ways.items()})
    tables = replay({name: way.build for name, way in ways.items() if way.build is not None})
    times = {name: time + tables.get(name, 0.0) / LAYERS for name, time in times.items()}
    best = min(times[name] for name in STOCK if name in times)
    facts: Facts = {"batch": batch, "context": context, **times, "best stock": best}
    facts["floor"] = 1e6 * batch * min(context, WINDOW) * KV_HEADS * 2 * SIZE * 2 / bandwidth
    facts["goal"] = GOALS.get(batch, "")
    facts["slower than stock"] = ", ".join(name for name in OURS if times[name] > best) or "none"
    facts |= {f"{name} table": tables[name] for name in OURS}
    return facts | {f"error {name}": f"{error:.1e}" for name, error in errors.items()}


if __name__ == "__main__":
    main()
