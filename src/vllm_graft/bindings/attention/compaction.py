"""Rewrite the rows of a step, so that a stock kernel attends to the blocks of a window alone.

A kernel walks a row's block table from the first entry to the row's length, and masks nothing but the future. So a row
whose table lacks the blocks between the first tokens and the window, and whose length lacks their tokens, is attention
over that window: the keys carry their positions already. A window moves in steps of ``step`` tokens, so that every
query of a step sees the same blocks. A row with the queries of several steps (a prompt, or drafts across a border) is
cut into one row for each step, which is what the kernel would see if they came one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

SMALLEST_STEP = 64
"""Tokens by which a window moves at least. Kernels work on tiles of queries: a shorter step would cut prompts into rows
that fill a part of a tile."""


@dataclass(frozen=True, slots=True)
class WindowShape:
    """A window in whole blocks, with which a kernel and the KV-cache manager agree on what is seen.

    first:  tokens at the start of the sequence that stay, a multiple of the block size
    before: tokens before the step of a query that it sees, a multiple of ``step``
    step:   tokens by which the window moves, a multiple of the block size
    """

    first: int
    before: int
    step: int

    @classmethod
    def fit(cls, first: int, last: int, block_size: int) -> WindowShape:
        """Fit a window to whole blocks: ``first`` is rounded up, ``last`` is the most that a query sees.

        Raises ValueError for a window that does not hold two steps, or is not larger than ``first``.
        """
        step = -(-SMALLEST_STEP // block_size) * block_size
        if last < 2 * step:
            raise ValueError(
                f"a window of {last} tokens is too small: with KV-cache blocks of {block_size} tokens it moves by "
                f"{step} tokens at a time, and takes at least {2 * step}"
            )
        if first > last:
            raise ValueError(
                f"the first {first} tokens are more than the window of {last}, which would slide over them"
            )
        return cls(-(-first // block_size) * block_size, (last // step - 1) * step, step)

    @classmethod
    def whole(cls, first: int, tokens: int, block_size: int) -> WindowShape:
        """Return a window that leaves out none of ``tokens`` tokens: the widest that requests may narrow."""
        step = -(-SMALLEST_STEP // block_size) * block_size
        return cls(-(-first // block_size) * block_size, -(-tokens // step) * step, step)

    def narrowed(self, last: int) -> WindowShape:
        """Return this window for a request that asks for fewer tokens: at least two steps, never more than it is."""
        return WindowShape(self.first, min(self.before, max(1, last // self.step - 1) * self.step), self.step)

    @property
    def most(self) -> int:
        """The most tokens that a query sees."""
        return self.first + self.before + self.step

    def start(self, position: int) -> int:
        """Return the first token of the window of a query, which also sees the first tokens of the sequence."""
        return max(0, position // self.step * self.step - self.before)

    def gap(self, position: int) -> int:
        """Return how many tokens before a query it does not see: those between the first tokens and its window."""
        return max(0, self.start(position) - self.first)

    def pairs(self, begin: int, end: int) -> int:
        """Return how many pairs of a query and a token that it sees there are, for the queries of these positions."""
        return (end * (end + 1) - begin * (begin + 1)) // 2 - self._gaps(end) + self._gaps(begin)

    def _gaps(self, end: int) -> int:
        """Return the sum of the gaps of all queries before a position."""
        steps, rest = divmod(end, self.step)
        kept = self.first + self.before
        # The gap grows by a step with every step, from the first one that has any.
        without = min(kept // self.step + 1, steps)
        whole = self.step * (without + steps - 1) * (steps - without) // 2 - kept * (steps - without)
        return self.step * whole + rest * self.gap(end)


class StepRows(NamedTuple):
    """The rows of a step: the fields of vLLM's metadata that a compaction replaces."""

    starts: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor


def cut(
    rows: StepRows, shape: WindowShape, block_size: int, most: torch.Tensor, before: torch.Tensor | None = None
) -> StepRows:
    """Return the rows cut at the steps of the window, each with the blocks that its queries see.

    ``most`` is how many rows each row may become, on the host (``rows_after_cut``). Rows that turn out to be fewer are
    left empty, at the end of their row's tokens: how many they are is known on the device alone. ``before`` is that of
    each row, if requests have narrower windows of their own.
    """
    import torch

    device = rows.lengths.device
    row = torch.repeat_interleave(torch.arange(len(most)), most)
    number = torch.arange(len(row)) - (torch.cumsum(most, 0) - most)[row]
    row, number = row.to(device, non_blocking=True), number.to(device, non_blocking=True)
    begins, lengths = rows.starts[:-1].long(), rows.lengths.long()
    context = lengths - (rows.starts[1:].long() - begins)
    context, length = context[row], lengths[row]
    group = torch.div(context, shape.step, rounding_mode="floor") + number
    low = torch.minimum(torch.maximum(context, group * shape.step), length)
    high = torch.maximum(torch.minimum(length, (group + 1) * shape.step), low)
    window = (group * shape.step - (shape.before if before is None else before.long()[row])).clamp(min=0)
    starts = torch.empty(len(row) + 1, dtype=rows.starts.dtype, device=device)
    starts[:-1] = begins[row] + low - context
    starts[-1] = rows.starts[-1]
    gap = (window - shape.first).clamp(min=0)
    compacted = torch.where(high > low, high - gap, 0).to(rows.lengths.dtype)
    return StepRows(starts, compacted, _without_gap(rows.blocks, row, gap, shape.first, shape.most, block_size))


def rows_after_cut(starts: torch.Tensor, step: int) -> torch.Tensor:
    """Return how many rows each row may become, from the queries' starts on the host.

    Where a row's context ends inside a step is not known there, so that a row of n tokens may touch one step more.
    """
    tokens = starts[1:] - starts[:-1]
    return ((tokens + step - 2) // step + 1).clamp(min=1)


def without_empty(rows: StepRows) -> StepRows:
    """Return the rows that have queries. On the host: a device would have to be asked how many they are."""
    import torch

    full = (rows.starts[1:] > rows.starts[:-1]).nonzero().flatten()
    return StepRows(torch.cat((rows.starts[full], rows.starts[-1:])), rows.lengths[full], rows.blocks[full])


def shift(rows: StepRows, window: int, block_size: int) -> StepRows:
    """Return the rows without the blocks before a sliding window of the model's own; the kernel masks the rest.

    The window of a row's first query counts, so a row stays one row.
    """
    import torch

    context = rows.lengths.long() - (rows.starts[1:].long() - rows.starts[:-1].long())
    skipped = torch.div((context - window + 1).clamp(min=0), block_size, rounding_mode="floor") * block_size
    row = torch.arange(len(context), device=context.device)
    width = rows.blocks.shape[1] * block_size
    blocks = _without_gap(rows.blocks, row, skipped, 0, width, block_size)
    return StepRows(rows.starts, (rows.lengths - skipped).to(rows.lengths.dtype), blocks)


def without_null(rows: StepRows, block_size: int) -> StepRows:
    """Return the rows without the null blocks in their tables, which stand where blocks were evicted."""
    import torch

    width = rows.blocks.shape[1]
    inside = torch.arange(width, device=rows.blocks.device) * block_size < rows.lengths[:, None]
    gone = inside & (rows.blocks == 0)
    # Stable, so that blocks stay in their order and the last one, which may be part full, is last.
    order = torch.argsort((gone | ~inside).to(torch.int8), dim=1, stable=True)
    lengths = rows.lengths - gone.sum(1, dtype=rows.lengths.dtype) * block_size
    return StepRows(rows.starts, lengths, rows.blocks.gather(1, order).contiguous())


def _without_gap(
    blocks: torch.Tensor, row: torch.Tensor, gap: torch.Tensor, first: int, most: int, block_size: int
) -> torch.Tensor:
    """Return block tables that leave out ``gap`` tokens after the first ones, as wide as ``most`` tokens need."""
    import torch

    width = min(-(-most // block_size), blocks.shape[1])
    column = torch.arange(width, device=blocks.device)
    source = column + torch.where(column < first // block_size, 0, (gap // block_size)[:, None])
    return blocks[row[:, None], source.clamp(max=blocks.shape[1] - 1)].contiguous()
