"""The router of one layer: its calls counted, its answers checked, and the way back to the model's own rule.

A bad answer never reaches the experts' kernel, which would read past their weights: each one is looked at. The way for
devices, which waits for nothing, is unit-tested but not in use: layers on a GPU are refused until routers have run
there (``planned_router.unserved``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.contracts import MoeRouter
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import PlanItem
from vllm_graft.points import point

if TYPE_CHECKING:
    import torch

Routing = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "tuple[torch.Tensor, torch.Tensor]"]
"""A layer's routing as vLLM calls it: from hidden states, logits and token ids to weights and ids, in this order."""

_BAD: Final = "route() returned ids of experts that do not exist, or weights that are not finite"


class RouterState:
    """Whether the planned router is in use in this process: shared by all of its layers."""

    def __init__(self, item: PlanItem, ledger: Ledger) -> None:
        self._item = item
        self._ledger = ledger
        self._flag: Any = None
        self.aside = ""
        """Why the router was put aside; empty while it is called."""
        self.meter = ledger.hook(item.name, "route", point(item.point).budget_us)

    def put_aside(self, layer: str, reason: str) -> None:
        """Go on with the models' own rule from now on."""
        if not self.aside:
            self.aside = f"{layer}: {reason}"
            self._ledger.put_aside(self._item.name, self.aside)

    def flag(self, device: torch.device) -> torch.Tensor:
        """Return the flag that rows with a bad answer set on the device."""
        if self._flag is None:
            from vllm_graft.bindings.sampling.isolation import DeviceFlag

            self._flag = DeviceFlag(device)
        seen: torch.Tensor = self._flag.seen
        return seen

    def end_step(self) -> None:
        """Read the flag, if it has arrived, and send for it; called once in each step, outside of graphs."""
        if self._flag is None or self.aside:
            return
        if self._flag.is_set():
            self.put_aside("some layer", _BAD)
        self._flag.count_step()


def rows_to_replace(bad: torch.Tensor, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the rows that get the stock answer: the bad ones, and all of them once any was; waits for nothing.

    Padding that holds NaN is replaced, and leaves ``seen`` as it is. Layers on a GPU are refused so far
    (``planned_router.unserved``), so only tests call this: vLLM's own rule also writes the expert -1 in rows that pad a
    captured batch, which is blamed on the router here.
    """
    seen |= (bad & logits.isfinite().all(-1)).any()
    return bad | (seen > 0)


class RoutedLayer:
    """One layer with the planned router."""

    def __init__(self, router: MoeRouter, stock: Routing, state: RouterState) -> None:
        self.router = router
        self._stock = stock
        self._state = state
        self._left = False

    def leave(self) -> None:
        """Leave this layer to the model's own rule, because it was refused."""
        self._left = True

    def route(
        self, hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and ids for vLLM's kernels: float32 and int32, contiguous."""
        if self._left or self._state.aside:
            return self._stock(hidden, logits, input_ids)
        started = time.perf_counter_ns()
        try:
            weights, ids = self._ask(hidden, logits, input_ids)
        except BaseException as error:
            if raised_by_signal(error):
                raise
            self._state.meter.error()
            self._state.put_aside(self.router.layer.name, reason_of(error))
            return self._stock(hidden, logits, input_ids)
        finally:
            self._state.meter.count(time.perf_counter_ns() - started)
        return weights, ids

    def trial(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Route rows that are made up; raise what the router raises, or a ValueError for a bad answer."""
        weights, ids = self._answer(hidden, logits, None)
        bad = self._bad_rows(weights, ids)
        if bool(bad.any()):
            raise ValueError(self._describe(weights, ids))

    def _ask(
        self, hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self._answer(hidden, logits, input_ids)
        bad = self._bad_rows(weights, ids)
        if bad.device.type == "cpu":
            if not bool(bad.any()):
                return weights, ids
            if bool((bad & logits.isfinite().all(-1)).any()):
                raise ValueError(self._describe(weights, ids))
        else:
            bad = rows_to_replace(bad, logits, self._state.flag(bad.device))
        stock_weights, stock_ids = self._stock(hidden, logits, input_ids)
        return weights.where(~bad[:, None], stock_weights), ids.where(~bad[:, None], stock_ids.to(ids.dtype))

    def _answer(
        self, hidden: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the router, and bring its answer into the form that kernels take; raise if it has another."""
        import torch

        def stock(hidden: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = self._stock(hidden, logits, input_ids)
            return ids, weights

        layer, rows = self.router.layer, len(logits)
        # Set anew in each call: the token ids that some models route by are those of the step.
        self.router.stock = stock
        answer: Any = self.router.route(hidden, logits, layer.top_k)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ValueError(f"route() returned {type(answer).__name__} instead of (ids, weights)")
        ids, weights = answer
        for name, part in (("ids", ids), ("weights", weights)):
            if not isinstance(part, torch.Tensor):
                raise ValueError(f"route() returned {type(part).__name__} as {name} instead of a tensor")
            if tuple(part.shape) != (rows, layer.top_k):
                raise ValueError(f"route() returned {name} of {list(part.shape)} instead of {[rows, layer.top_k]}")
            if part.device != logits.device:
                raise ValueError(f"route() returned {name} on {part.device} for logits on {logits.device}")
        if ids.dtype not in (torch.int16, torch.int32, torch.int64):
            raise ValueError(f"route() returned ids of {ids.dtype}, which are not whole numbers")
        if not weights.is_floating_point():
            raise ValueError(f"route() returned weights of {weights.dtype}, which are not floating-point numbers")
        return weights.to(torch.float32).contiguous(), ids.to(torch.int32).contiguous()

    def _bad_rows(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (~weights.isfinite() | (ids < 0) | (ids >= self.router.layer.experts)).any(-1)

    def _describe(self, weights: torch.Tensor, ids: torch.Tensor) -> str:
        low, high, experts = int(ids.min()), int(ids.max()), self.router.layer.experts
        if low < 0 or high >= experts:
            return f"route() returned the expert {low if low < 0 else high}, but there are 0 to {experts - 1}"
        rows = int((~weights.isfinite()).any(-1).sum())
        return f"route() returned weights that are NaN or infinite, for {rows} of {len(weights)} tokens"
