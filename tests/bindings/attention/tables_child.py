"""Runs the Triton kernels of the binding under Triton's interpreter, and prints what came out.

A process of its own, because Triton decides at import whether kernels are interpreted.
"""

import json
import os
import random
import traceback
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch

from vllm_graft.bindings.attention import token_tables
from vllm_graft.bindings.attention.compaction import StepRows, WindowShape, cut, shift, without_null
from vllm_graft.bindings.attention.triton_kernels import compact_evicted, compact_single_tokens, list_tokens

HEADS, SIZE = 2, 3


def some_rows(draw, block):
    """Rows of one token each, one of them the padding of a captured batch."""
    lengths = [draw.randrange(1, 900) for _ in range(3)] + [0]
    width = -(-max(lengths) // block) + 2
    blocks = torch.randperm(4 * width)[: 4 * width].view(4, width).int() + 1
    return StepRows(torch.arange(5, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), blocks)


def same(found, wanted, block):
    """Rows agree as far as a kernel reads their tables."""
    assert torch.equal(found.lengths, wanted.lengths), (found.lengths, wanted.lengths)
    for row, length in enumerate(found.lengths.tolist()):
        used = -(-length // block)
        assert torch.equal(found.blocks[row, :used], wanted.blocks[row, :used]), row


def check_windows():
    draw = random.Random(1)
    for block in (16, 32):
        for sinks, window in ((0, 128), (20, 200), (70, 600)):
            rows, shape = some_rows(draw, block), WindowShape.fit(sinks, window, block)
            lengths, blocks = torch.zeros(4, dtype=torch.int32), torch.zeros(4, shape.most // block, dtype=torch.int32)
            compact_single_tokens(rows.lengths, rows.blocks, lengths, blocks, block, shape, 0)
            wanted = cut(rows, shape, block, torch.ones(4, dtype=torch.long))
            same(StepRows(rows.starts, lengths, blocks), wanted, block)


def check_windows_of_single_requests():
    draw = random.Random(6)
    for block in (16, 32):
        rows, shape = some_rows(draw, block), WindowShape.fit(20, 600, block)
        lengths, blocks = torch.zeros(4, dtype=torch.int32), torch.zeros(4, shape.most // block, dtype=torch.int32)
        own = [shape.narrowed(window).before for window in (128, 300, 5000, 600)]
        before = torch.tensor(own, dtype=torch.int32)
        compact_single_tokens(rows.lengths, rows.blocks, lengths, blocks, block, shape, 0, before)
        wanted = cut(rows, shape, block, torch.ones(4, dtype=torch.long), before)
        same(StepRows(rows.starts, lengths, blocks), wanted, block)
        assert own[0] < own[1] < own[2] == own[3] == shape.before


def check_windows_of_the_model():
    draw = random.Random(2)
    for block, window in ((16, 100), (32, 128), (16, 700)):
        rows = some_rows(draw, block)
        lengths = torch.zeros(4, dtype=torch.int32)
        blocks = torch.zeros(4, -(-(window + block) // block), dtype=torch.int32)
        compact_single_tokens(rows.lengths, rows.blocks, lengths, blocks, block, None, window)
        # A row of the torch way is not empty, and begins a block later where the window leaves one just now.
        wanted = shift(StepRows(rows.starts, rows.lengths.clamp(min=1), rows.blocks), window, block)
        same(
            StepRows(rows.starts[:4], lengths[:3], blocks[:3]),
            StepRows(rows.starts, wanted.lengths[:3], wanted.blocks),
            block,
        )


def check_evicted_blocks():
    draw = random.Random(3)
    for block in (16, 32):
        rows = some_rows(draw, block)
        for row, length in enumerate(rows.lengths.tolist()):
            for column in range(1, max(1, -(-length // block) - 1)):
                rows.blocks[row, column] *= draw.random() < 0.5
        lengths, blocks = torch.zeros(4, dtype=torch.int32), torch.zeros_like(rows.blocks)
        compact_evicted(rows.lengths, rows.blocks, lengths, blocks, block)
        same(StepRows(rows.starts, lengths, blocks), without_null(rows, block), block)


def caches(blocks, block):
    """One cache in the layouts that vLLM has: tokens or heads first, blocks of all layers side by side."""
    plain = torch.randn(blocks, HEADS, block, 2 * SIZE)
    yield plain
    yield plain.transpose(1, 2).contiguous().transpose(1, 2)
    beside = torch.randn(blocks, 3, block, HEADS, 2 * SIZE)
    beside[:, 1] = plain.transpose(1, 2)
    yield beside[:, 1].transpose(1, 2)


def check_tables_of_tokens():
    """Each row sees the last tokens of its request, in order, in every layout of the cache."""
    draw = random.Random(4)
    for block, window in ((16, 100), (32, 600)):
        rows = some_rows(draw, block)
        for cache in caches(int(rows.blocks.max()) + 1, block):
            lengths, tokens = torch.zeros(4, dtype=torch.int32), torch.zeros(4, window, dtype=torch.int32)
            stride = token_tables.token_stride(cache)
            list_tokens(rows.lengths, rows.blocks, lengths, tokens, block, window, stride)
            assert lengths.tolist() == [min(length, window) for length in rows.lengths.tolist()]
            pages = token_tables.by_token(cache)
            for row, length in enumerate(rows.lengths.tolist()):
                used = rows.blocks[row, : -(-length // block)].long()
                whole = cache[used].transpose(1, 2).flatten(0, 1)[:length][-window:]
                assert torch.equal(pages[tokens[row, : lengths[row]].long()][:, :, 0], whole), (block, window, row)


def check_compactor():
    """Steps of single tokens get tables of tokens where the layers follow them, and marked metadata."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from vllm_graft.bindings.attention.backends import Compactor
    from vllm_graft.bindings.attention.request_windows import RowWindows

    block, window = 16, 100
    rows = some_rows(random.Random(5), block)
    cache = next(caches(int(rows.blocks.max()) + 1, block))
    spec = SlidingWindowSpec(
        block_size=block, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, sliding_window=window
    )
    for version, follows in ((3, True), (2, False)):
        impl = SimpleNamespace(vllm_flash_attn_version=version, forward=lambda *args: args[4])
        token_tables.read_tokens(impl)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(),
            compilation_config=SimpleNamespace(
                static_forward_context={"layer": SimpleNamespace(impl=impl, kv_cache=cache)}
            ),
        )
        compactor = Compactor(spec, ["layer"], config, "cpu", RowWindows())
        compactor.on_cpu, compactor._rows = False, 4
        compactor._blocks, compactor._lengths = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        assert compactor.lists_tokens(SimpleNamespace(max_query_len=1)) is follows
        assert not compactor.lists_tokens(SimpleNamespace(max_query_len=2))
        marked = SimpleNamespace(**{token_tables.MARK: True})
        shown = impl.forward(None, None, None, None, cache, marked if follows else SimpleNamespace())
        assert shown.shape[2] == (1 if follows else block)
        if follows:
            assert compactor._list_tokens(rows).lengths.tolist() == [min(n, window) for n in rows.lengths.tolist()]


def outcome(check):
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({name: outcome(check) for name, check in globals().copy().items() if name.startswith("check_")}))
