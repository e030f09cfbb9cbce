"""``top-n-sigma``: keeps the tokens whose logit is within some standard deviations of the greatest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from vllm_graft.contracts import Key, KeyValue, Params, Rows, ServedModel, Statistics, Truncation
from vllm_graft.contracts.kernels import mask_below, statistics, warm_up

if TYPE_CHECKING:
    import torch

_OFF: Final = -1.0
# float32 has no room for more, and the product with a spread must stay finite.
_GREATEST: Final = 1e30


class TopNSigma(Truncation):
    """Takes away every token whose logit is below ``max - top_n_sigma * standard deviation``.

    Logits that are -inf count nowhere. Temperature does not change which tokens stay.
    """

    keys: ClassVar[tuple[Key, ...]] = (
        Key(
            "top_n_sigma",
            "float",
            0.0,
            aliases=("nsigma", "top_nsigma"),
            switch=True,
            help="how many standard deviations below the greatest; 0 or less switches it off",
        ),
    )

    @classmethod
    def is_requested(cls, params: Mapping[str, KeyValue]) -> bool:
        """Return whether the value is above 0: clients send -1 for off as well as 0."""
        value = params.get("top_n_sigma", 0.0)
        return isinstance(value, int | float) and value > 0

    def setup(self, model: ServedModel) -> None:
        """Make the table of requests' values."""
        self._sigmas = model.per_slot(_OFF)
        warm_up(model, lambda logits, rows: mask_below(logits, rows.rows, statistics(logits, rows.rows).max))

    def open(self, slot: int, params: Params) -> bool:
        """Read the request's key; a greedy request takes its most probable token anyway."""
        sigmas = params.number("top_n_sigma")
        meant = sigmas > 0 and not params.greedy
        self._sigmas[slot] = min(sigmas, _GREATEST) if meant else _OFF
        return meant

    def threshold(self, stats: Statistics, rows: Rows) -> torch.Tensor:
        """Return the greatest logit less as many standard deviations as the request says."""
        import torch

        sigmas = self._sigmas.of(rows)
        return torch.where(sigmas > 0, stats.max - sigmas * stats.std, -torch.inf)
