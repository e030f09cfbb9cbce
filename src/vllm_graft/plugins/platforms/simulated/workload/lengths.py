"""The lengths that a description may ask for: always the same, or lognormal as prompts and answers are in practice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_graft.plugins.platforms.simulated.workload.draws import Draws
from vllm_graft.plugins.platforms.simulated.workload.fields import MOST, Fields


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths around a mean, those beyond the bounds moved to the bounds; constant with sigma 0."""

    mean: float
    sigma: float = 0.0
    least: int = 1
    most: int | None = None

    def draw(self, draws: Draws) -> int:
        """One length."""
        value = self.mean * math.exp(self.sigma * draws.normal() - self.sigma * self.sigma / 2)
        return min(max(self.least, round(value)), MOST if self.most is None else self.most)


def lengths_of(value: object, what: str, where: Callable[[str | None], str]) -> Lengths:
    """The lengths that a number or a table describes."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"tokens": value}
    fields = Fields(value, what, where)
    if "tokens" in fields:
        fields.only(("tokens",))
        return Lengths(fields.count("tokens"))
    fields.only(("tokens", "mean", "sigma", "min", "max"))
    least = fields.count("min", 1)
    most = fields.count("max") if "max" in fields else None
    if most is not None and most < least:
        raise fields.wrong("max", f"max is {most}, below min, {least}", "swap or correct them")
    mean, sigma = fields.number("mean", least=1.0, most=MOST), fields.number("sigma", 0.0, most=10.0)
    if mean < least:
        raise fields.wrong("mean", f"mean is {mean:.15g}, below min, {least}", "correct one of them")
    if most is not None and mean > most:
        raise fields.wrong("mean", f"mean is {mean:.15g}, above max, {most}", "correct one of them")
    return Lengths(mean, sigma, least, most)
