"""Compacted rows against the definition of a window: every query sees exactly its keys, whatever the step holds."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.bindings.attention.compaction import (
    SMALLEST_STEP,
    StepRows,
    WindowShape,
    cut,
    rows_after_cut,
    shift,
    without_empty,
    without_null,
)

HOLE = -1
"""What stands in a block table where the manager has freed a block: nobody may see it."""


@st.composite
def windows(draw: st.DrawFn) -> tuple[WindowShape, int]:
    """A window and the block size it was fitted to."""
    block = draw(st.sampled_from([1, 8, 16, 32, 48, 64, 128]))
    step = -(-SMALLEST_STEP // block) * block
    last = draw(st.integers(2 * step, 5 * step))
    return WindowShape.fit(draw(st.integers(0, min(last, 3 * block))), last, block), block


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    """The requests of a step: tokens in the KV cache before it, and new ones; some decode, some read a prompt."""
    new = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 400))
    return draw(st.lists(st.tuples(st.integers(0, 1500), new), min_size=1, max_size=5))


def rows_of(requests: list[tuple[int, int]], block: int) -> StepRows:
    """Rows as vLLM writes them. Block ``i`` of request ``r`` has the number ``10_000 * r + i``."""
    lengths = [context + new for context, new in requests]
    width = -(-max(lengths) // block) + 2
    blocks = torch.full((len(requests), width), HOLE, dtype=torch.int32)
    for row, length in enumerate(lengths):
        used = -(-length // block)
        blocks[row, :used] = 10_000 * row + torch.arange(used, dtype=torch.int32)
    starts = torch.tensor([0, *(new for _, new in requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return StepRows(starts, torch.tensor(lengths, dtype=torch.int32), blocks)


def seen(rows: StepRows, block: int) -> dict[int, list[tuple[int, int]]]:
    """What each query sees through the rows under causal masking: pairs of request and token, in table order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for row, length in enumerate(rows.lengths.tolist()):
        begin, end = rows.starts[row].item(), rows.starts[row + 1].item()
        # A kernel reads the table as far as the row's length, and no further.
        assert length <= rows.blocks.shape[1] * block
        numbers = rows.blocks[row, : -(-length // block)].tolist()
        tokens = [(n // 10_000, n % 10_000 * block + place) for n in numbers for place in range(block)]
        for query in range(begin, end):
            # The last query is the last token of the row.
            found[query] = tokens[: length - (end - 1 - query)]
    return found


def by_definition(requests: list[tuple[int, int]], shape: WindowShape) -> dict[int, list[tuple[int, int]]]:
    """The same from the mask itself."""
    found, query = {}, 0
    for request, (context, new) in enumerate(requests):
        for position in range(context, context + new):
            start = position // shape.step * shape.step - shape.before
            keys = [key for key in range(position + 1) if key < shape.first or key >= start]
            found[query] = [(request, key) for key in keys]
            query += 1
    return found


@settings(max_examples=120, deadline=None)
@given(windows(), batches())
def test_a_cut_shows_every_query_its_window_and_nothing_else(window: tuple[WindowShape, int], requests):
    shape, block = window
    rows = rows_of(requests, block)
    compacted = cut(rows, shape, block, rows_after_cut(rows.starts, shape.step))
    assert seen(compacted, block) == by_definition(requests, shape)
    assert compacted.lengths.max() <= shape.most
    assert compacted.blocks.shape[1] * block <= max(shape.most, rows.blocks.shape[1] * block)
    assert (compacted.starts.dtype, compacted.lengths.dtype) == (rows.starts.dtype, rows.lengths.dtype)
    assert compacted.starts[-1] == rows.starts[-1]
    assert (compacted.starts.diff() >= 0).all()


@settings(max_examples=60, deadline=None)
@given(windows(), batches(), st.data())
def test_a_cut_follows_the_windows_of_single_requests(window: tuple[WindowShape, int], requests, data: st.DataObject):
    """The manager frees by the request's own window, and none of its blocks is read afterwards."""
    shape, block = window
    own = [shape.narrowed(data.draw(st.integers(1, 6 * shape.step))) for _ in requests]
    rows = rows_of(requests, block)
    for row, (context, _) in enumerate(requests):
        skipped = max(0, context - (own[row].before + shape.step - block))
        rows.blocks[row, shape.first // block : max(skipped // block, shape.first // block)] = HOLE
    before = torch.tensor([each.before for each in own], dtype=torch.int32)
    shown = seen(cut(rows, shape, block, rows_after_cut(rows.starts, shape.step), before), block)
    query = 0
    for request, (context, new) in enumerate(requests):
        alone = by_definition([(context, new)], own[request])
        for number in range(new):
            assert shown[query] == [(request, key) for _, key in alone[number]]
            query += 1


@settings(max_examples=60, deadline=None)
@given(windows(), batches())
def test_rows_without_queries_can_be_left_out(window: tuple[WindowShape, int], requests):
    """On the host their number is known, and a row for each step that the queries touch is left."""
    shape, block = window
    rows = rows_of(requests, block)
    cuts = without_empty(cut(rows, shape, block, rows_after_cut(rows.starts, shape.step)))
    assert seen(cuts, block) == by_definition(requests, shape)
    assert (cuts.starts.diff() > 0).all()
    steps = [(old + new - 1) // shape.step - old // shape.step + 1 for old, new in requests]
    assert len(cuts.lengths) == sum(steps)
    assert (rows_after_cut(rows.starts, shape.step) >= torch.tensor(steps)).all()


@settings(max_examples=60, deadline=None)
@given(windows(), batches())
def test_a_cut_reads_no_block_that_the_manager_has_freed(window: tuple[WindowShape, int], requests):
    """The manager frees by the tokens computed before the step, and keeps what the step's first query sees."""
    shape, block = window
    rows = rows_of(requests, block)
    for row, (context, _) in enumerate(requests):
        # The window that SinkWindowSpec gives to vLLM's own manager.
        skipped = max(0, context - (shape.before + shape.step - block))
        rows.blocks[row, shape.first // block : max(skipped // block, shape.first // block)] = HOLE
    compacted = cut(rows, shape, block, rows_after_cut(rows.starts, shape.step))
    assert seen(compacted, block) == by_definition(requests, shape)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 8, 16, 32]), st.integers(1, 700), batches())
def test_a_shift_drops_whole_blocks_before_the_models_own_window(block: int, window: int, requests):
    """The kernel masks the rest by the distance from the query, which a shift leaves as it is."""
    rows = rows_of(requests, block)
    shifted = shift(rows, window, block)
    shown, query = seen(shifted, block), 0
    for request, (context, new) in enumerate(requests):
        for position in range(context, context + new):
            wanted = [(request, key) for key in range(max(0, position - window + 1), position + 1)]
            assert shown[query][-len(wanted) :] == wanted
            assert len(shown[query]) < window + new + block
            query += 1
    assert torch.equal(shifted.starts, rows.starts)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 8, 16, 32]), batches(), st.randoms(use_true_random=False))
def test_null_blocks_are_left_out(block: int, requests, draw):
    """Of the blocks before a step, as many as a policy likes; those that the step writes are there."""
    rows, gone = rows_of(requests, block), set()
    # The null block has the number 0, which is the first of the first request here.
    rows = rows._replace(blocks=torch.where(rows.blocks == HOLE, 0, rows.blocks + 1))
    for row, (context, _) in enumerate(requests):
        for index in range(context // block):
            if draw.random() < 0.5:
                rows.blocks[row, index] = 0
                gone |= {(row, token) for token in range(index * block, (index + 1) * block)}
    compacted = without_null(rows, block)
    shown = seen(compacted._replace(blocks=compacted.blocks - 1), block)
    query = 0
    for row, (context, new) in enumerate(requests):
        for position in range(context, context + new):
            assert shown[query] == [(row, key) for key in range(position + 1) if (row, key) not in gone]
            query += 1


@settings(max_examples=100, deadline=None)
@given(windows(), st.integers(0, 3000), st.integers(0, 300))
def test_a_shape_counts_what_its_queries_see(window: tuple[WindowShape, int], begin: int, number: int):
    """``gap`` and ``pairs``, by which the simulated device reckons."""
    shape, _ = window
    sees = [
        sum(key < shape.first or key >= shape.start(position) for key in range(position + 1))
        for position in range(begin, begin + number, 37)
    ]
    places = range(begin, begin + number, 37)
    assert sees == [position + 1 - shape.gap(position) for position in places]
    assert all(count <= shape.most for count in sees)
    every = sum(position + 1 - shape.gap(position) for position in range(begin, begin + number))
    assert shape.pairs(begin, begin + number) == every


class TestFit:
    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 300), st.integers(0, 5000), st.integers(1, 5000))
    def test_a_window_is_whole_blocks_and_never_wider_than_asked(self, block: int, first: int, last: int):
        step = -(-SMALLEST_STEP // block) * block
        if last < 2 * step or first > last:
            with pytest.raises(ValueError, match=r"too small|more than the window"):
                WindowShape.fit(first, last, block)
            return
        shape = WindowShape.fit(first, last, block)
        assert shape.step == step
        assert shape.first % block == shape.before % step == 0
        assert 0 <= shape.first - first < block
        # A query at the end of a step sees all that was asked for, less what does not fill a step.
        assert 0 <= last - (shape.before + shape.step) < step
        assert shape.before >= step

    def test_what_cannot_be_fitted_says_what_can(self):
        with pytest.raises(ValueError, match=re.escape("it moves by 64 tokens at a time, and takes at least 128")):
            WindowShape.fit(0, 127, 16)
        with pytest.raises(ValueError, match="the first 300 tokens are more than the window of 256"):
            WindowShape.fit(300, 256, 16)
        assert WindowShape.fit(4, 256, 16) == WindowShape(16, 192, 64)
        assert WindowShape.fit(4, 256, 16).most == 272
