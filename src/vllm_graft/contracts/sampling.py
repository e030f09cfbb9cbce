"""The sampling contract: change the logits of the requests that ask for it, before a token is picked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_graft.contracts.item import Item

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step's logits that a strategy is to change: which row, and which slot's request it belongs to.

    Both are tensors of whole numbers on the logits' device, of equal length. Rows change from step to step; a slot
    stays a request's own until it is opened again.
    """

    rows: torch.Tensor
    slots: torch.Tensor


class SamplingStrategy(Item):
    """Changes the logits of the requests that ask for it. Lives in each worker.

    ``keys`` are the names a request may carry in ``vllm_xargs``; a request that carries none of them is none of this
    strategy's business. ``check`` refuses bad values in the front end, where a ValueError becomes a 400; ``open``
    takes a request in; ``step`` changes its rows, in place, once per step for the whole batch. ::

        class Flatten(SamplingStrategy):
            keys = ("flatten",)

            def __init__(self, options=None):
                super().__init__(options)
                self.factors = {}

            @classmethod
            def check(cls, params):
                if not 0 < float(params["flatten"]) <= 1:
                    raise ValueError("flatten must lie above 0 and at most at 1")

            def open(self, slot, params):
                self.factors[slot] = float(params["flatten"])
                return True

            def step(self, logits, rows):
                factors = [self.factors[slot] for slot in rows.slots.tolist()]
                logits[rows.rows] *= logits.new_tensor(factors)[:, None]

    A strategy that raises, or that overruns its half millisecond again and again, is put aside: logits then pass as
    they are, and ``vllm-graft status`` shows it as quarantined.
    """

    keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, params: Mapping[str, object]) -> None:
        """Refuse bad values with a ValueError; ``params`` holds those of the request's keys that are ours."""

    def open(self, slot: int, params: Mapping[str, object]) -> bool:
        """A request enters under this slot, whoever had it before; returns whether its logits are to be changed."""
        raise NotImplementedError(f"{type(self).__name__} must implement open(slot, params)")

    def step(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change rows of the logits in place: ``logits`` is [rows, vocabulary] in float32."""
        raise NotImplementedError(f"{type(self).__name__} must implement step(logits, rows)")
