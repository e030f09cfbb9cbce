"""The expert-balancing contract: which expert sits in which slot, given the load that was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.contracts.item import Item

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Placement = NDArray[np.int64]
    """The expert in each slot of each layer, as ``placement[layer, slot]``. The slots of a rank are adjacent."""

    Loads = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """The load of the experts of one model, and where they sit.

    An expert is one of the model's own; a slot holds the weights of one expert on one rank. With more slots than
    experts, some experts sit in several slots, and vLLM spreads their tokens evenly over those.

    load:         tokens that each expert was given in vLLM's window, as ``load[layer, expert]``; a row may be all
                  zeros. Cannot be written
    placement:    the expert in each slot at present, as ``placement[layer, slot]``. Cannot be written
    groups:       groups of experts that a router chooses first, such as DeepSeek's; 1 if there are none
    nodes:        machines; ranks of one node are adjacent, and transfers within a node are faster
    ranks:        workers that share the experts, each with as many slots as the next
    stock_policy: what computes vLLM's own answer; call ``stock()``
    """

    load: Loads
    placement: Placement
    groups: int
    nodes: int
    ranks: int
    stock_policy: Callable[[], Placement]

    @property
    def layers(self) -> int:
        """The layers of the model that have experts."""
        return int(self.load.shape[0])

    @property
    def experts(self) -> int:
        """The experts of a layer."""
        return int(self.load.shape[1])

    @property
    def slots(self) -> int:
        """The slots of a layer, over all ranks."""
        return int(self.placement.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """The slots of a layer on one rank."""
        return self.slots // self.ranks

    def stock(self) -> Placement:
        """Return the placement that vLLM's own policy answers with, as a new array."""
        return self.stock_policy()

    def check(self, placement: object) -> Placement:
        """Return a placement as an array of its own; raise ValueError if vLLM could not use it.

        It may be a NumPy array, a tensor on the CPU or lists of whole numbers. It must have the shape of the present
        one, name only experts that exist, and have each of them in at least one slot.
        """
        import numpy as np

        found = np.array(placement)
        if found.shape != self.placement.shape:
            raise ValueError(f"a placement must have the shape {self.placement.shape}, but this one has {found.shape}")
        if found.dtype.kind not in "iu":
            raise ValueError(f"a placement must hold whole numbers, but this one holds {found.dtype}")
        wrong = np.argwhere((found < 0) | (found >= self.experts))
        if len(wrong):
            layer, slot = wrong[0]
            there = f"slot {slot} of layer {layer} holds expert {found[layer, slot]}"
            raise ValueError(f"{there}, but there are only the experts 0 to {self.experts - 1}")
        missing = np.argwhere(_copies(found, self.experts) == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ValueError(f"expert {expert} of layer {layer} is in no slot")
        return found.astype(np.int64)

    def rank_loads(self, placement: Placement) -> Loads:
        """Return the tokens that each rank would have been given with a placement, as ``[layer, rank]``."""
        import numpy as np

        share = self.load / np.maximum(_copies(placement, self.experts), 1)
        loads: Loads = np.take_along_axis(share, placement, axis=1).reshape(self.layers, self.ranks, -1).sum(axis=2)
        return loads

    def balance(self, placement: Placement) -> float:
        """Return how even a placement is: the mean rank's load over the busiest rank's, summed over layers.

        1 is perfect, and vLLM logs the same figure as balancedness. Without any load it is 1.
        """
        loads = self.rank_loads(placement)
        busiest = float(loads.max(axis=1).sum())
        return float(loads.mean(axis=1).sum()) / busiest if busiest else 1.0

    def moves(self, placement: Placement) -> Placement:
        """Return how many experts of each layer move: those that a rank gets and did not hold, for each rank."""
        import numpy as np

        new, old = (self._held(each) for each in (placement, self.placement))
        moved: Placement = np.count_nonzero(new & ~old, axis=(1, 2))
        return moved

    def _held(self, placement: Placement) -> NDArray[np.bool_]:
        """Return which experts a rank holds, as ``[layer, rank, expert]``."""
        import numpy as np

        held = np.zeros((self.layers, self.ranks, self.experts), dtype=bool)
        np.put_along_axis(held, placement.reshape(self.layers, self.ranks, -1), True, axis=2)
        return held


def _copies(placement: Placement, experts: int) -> Placement:
    """Return how many slots hold each expert, as ``[layer, expert]``."""
    import numpy as np

    return np.array([np.bincount(row, minlength=experts) for row in placement])


class ExpertBalancer(Item):
    """Decides which expert sits in which slot, whenever vLLM's EPLB rearranges the experts of a model.

    Implement ``place``. The first rank asks it, and all ranks follow the one answer: it need not be the same twice.
    An answer that vLLM could not use, an exception, or calls that overrun their budget again and again (2 seconds) put
    the balancer aside: vLLM's own policy answers from then on, no expert is lost, and ``vllm-graft status`` shows the
    balancer as quarantined with the error. It is not called while nothing was measured at all. ::

        class OnlyIfUneven(ExpertBalancer):
            options = {"below": 0.9}

            def place(self, experts):
                if experts.balance(experts.placement) >= self.option("below"):
                    return experts.placement
                return experts.stock()
    """

    def place(self, experts: ExpertLoad) -> Placement:
        """Return the expert for each slot, as ``[layer, slot]``; see ``ExpertLoad.check`` for what is accepted."""
        raise NotImplementedError(f"{type(self).__name__} must implement place(experts)")
