"""``xtc``: now and then takes away the most probable of several probable tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

from vllm_graft.contracts import Key, Params, Rows, SamplingStrategy, ServedModel
from vllm_graft.contracts.kernels import has_triton, log_of_sum, warm_up, works_by_row

if TYPE_CHECKING:
    import torch

# "XTC" in ASCII: other strategies that draw at the same position get other numbers.
_SALT: Final = 0x585443
_BLOCK: Final = 512


class Xtc(SamplingStrategy):
    """With probability ``xtc_probability``: of the tokens that are at least ``xtc_threshold`` probable, keeps only the
    least probable one, and those exactly as probable; all less probable tokens stay too.

    If there are not two such tokens, nothing changes. Probabilities are those before temperature.
    """

    keys: ClassVar[tuple[Key, ...]] = (
        Key("xtc_probability", "float", 0.0, low=0, high=1, switch=True, help="how often; 0 switches it off"),
        Key("xtc_threshold", "float", 0.1, low=0, high=1, help="how probable a token must be to count as a top choice"),
    )
    stage = "transform"
    atomic = True

    def setup(self, model: ServedModel) -> None:
        """Make the tables of requests' values."""
        self._chances = model.per_slot(0.0)
        self._logarithms = model.per_slot(math.inf)
        warm_up(model, lambda logits, rows: self._exclude(logits, rows, self._chances.of(rows)))

    def open(self, slot: int, params: Params) -> bool:
        """Read the request's keys; a greedy request keeps its most probable token."""
        chance, threshold = params.number("xtc_probability"), params.number("xtc_threshold")
        # Greedy requests never sample, and without their most probable token they would no longer be greedy.
        meant = chance > 0 and not params.greedy
        self._chances[slot] = chance if meant else 0.0
        self._logarithms[slot] = math.log(threshold) if threshold > 0 else -math.inf
        return meant

    def step(self, logits: torch.Tensor, rows: Rows) -> None:
        """Draw for each row, and exclude tokens if the draw is below the probability."""
        self._exclude(logits, rows, rows.uniform(_SALT))

    def _exclude(self, logits: torch.Tensor, rows: Rows, draws: torch.Tensor) -> None:
        if has_triton(logits):
            from vllm_graft.plugins.samplers.xtc_kernels import exclude

            chances, logarithms = self._chances.all(), self._logarithms.all()
            exclude(logits, rows.rows, rows.slots, draws, chances=chances, logarithms=logarithms)
            return
        drawn = draws < self._chances.of(rows)
        if not works_by_row(logits):
            exclude_top(logits, rows.rows, drawn, self._logarithms.of(rows))
            return
        import torch

        # Only the rows that were drawn, one after another, while each is in the cache.
        which = drawn.nonzero().flatten()
        numbers, limits = rows.rows[which].tolist(), self._logarithms.of(rows)[which].tolist()
        scratch = torch.empty(logits.shape[1])
        for row, limit in zip(numbers, limits, strict=True):
            _exclude_in_row(logits[row], limit, scratch)


def _exclude_in_row(row: torch.Tensor, logarithm: float, scratch: torch.Tensor) -> None:
    """Exclude tokens in one row on the host: only the few blocks that hold a probable token are read twice."""
    import torch

    size = min(_BLOCK, row.shape[0])
    whole = row.shape[0] - row.shape[0] % size
    blocks, rest = row[:whole].view(-1, size), row[whole:]
    tops = blocks.amax(1)
    greatest = torch.cat([tops, rest]).max().item()
    if greatest == -math.inf:
        return
    limit = greatest + log_of_sum(row, greatest, scratch) + logarithm
    (some,) = (tops >= limit).nonzero(as_tuple=True)
    near = blocks[some]
    probable = torch.cat([near.flatten(), rest])
    probable = probable[(probable >= limit) & (probable > -math.inf)]
    if len(probable) < 2:
        return
    least = probable.min()
    blocks[some] = near.masked_fill_(near > least, -math.inf)
    rest.masked_fill_(rest > least, -math.inf)


def exclude_top(logits: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor, logarithms: torch.Tensor) -> None:
    """Keep only the least probable of the probable tokens, in rows that were drawn, without waiting for a device."""
    import torch

    own = logits[rows]
    limits = (own.logsumexp(1) + logarithms)[:, None]
    probable = (own >= limits) & (own > -torch.inf)
    least = torch.where(probable, own, torch.inf).amin(1, keepdim=True)
    logits[rows] = torch.where((own > least) & drawn[:, None], -torch.inf, own)
