"""Runs the Triton kernels of the binding under Triton's interpreter, and prints what came out.

A process of its own, because Triton decides at import whether kernels are interpreted.
"""

import json
import os
import random
import traceback

os.environ["TRITON_INTERPRET"] = "1"

import torch

from vllm_graft.bindings.attention.compaction import StepRows, WindowShape, cut, shift, without_null
from vllm_graft.bindings.attention.triton_kernels import compact_evicted, compact_single_tokens


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


def outcome(check):
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({name: outcome(check) for name, check in globals().copy().items() if name.startswith("check_")}))
