"""``expert-mask``: keep all tokens away from some experts, to see what the model is without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from vllm_graft.contracts import MoeRouter, OptionError, OptionValue

if TYPE_CHECKING:
    import torch


class ExpertMask(MoeRouter):
    """Takes experts out of the choice, and leaves everything else to the model's own rule.

    experts: the numbers of the experts to leave out, as ``["3", "17"]``; with none, nothing changes
    layers:  the decoder layers that are meant, as ``all``, ``0-7`` or ``0-3, 8, 20-``

    The others take over: the model's rule is asked as if the gate had scored these experts lowest. A rule that chooses
    among groups or adds a bias may still name them, with weight 0.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {"experts": []}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse what is not the number of an expert."""
        super().check_options(options)
        for each in _listed(options["experts"]):
            if not each.isdecimal():
                raise OptionError(f"has {each!r}, which is not the number of an expert", option="experts")

    def route(self, hidden: torch.Tensor, logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's own choice among the other experts."""
        masked = sorted({int(each) for each in _listed(self.option("experts"))})
        if not masked:
            return self.stock(hidden, logits)
        if masked[-1] >= self.layer.experts:
            raise ValueError(f"there is no expert {masked[-1]}: {self.layer.name} has {self.layer.experts}")
        if self.layer.experts - len(masked) < top_k:
            raise ValueError(
                f"{self.layer.name} needs {top_k} experts, but {self.layer.experts - len(masked)} are left"
            )
        # Written column by column: an index tensor would be copied to the device in every step.
        scores = logits.clone()
        for expert in masked:
            scores[:, expert] = float("-inf")
        return self.stock(hidden, scores)


def _listed(experts: object) -> list[str]:
    return [str(each) for each in experts] if isinstance(experts, list) else []
