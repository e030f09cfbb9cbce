"""``stock-balancer``: vLLM's own policy, called through the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.contracts import ExpertBalancer, ExpertLoad

if TYPE_CHECKING:
    from vllm_graft.contracts.balancing import Placement


class StockBalancer(ExpertBalancer):
    """Answers what vLLM would; planned for its figures, or to compare another balancer with it."""

    def place(self, experts: ExpertLoad) -> Placement:
        """Return vLLM's own answer."""
        return experts.stock()
