"""The routing contract: which experts of a mixture-of-experts layer each token goes to, in models that vLLM has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.layer_choice import parse_layers

if TYPE_CHECKING:
    import torch

    Routes = tuple[torch.Tensor, torch.Tensor]
    """The experts of each token, and their weights."""


@dataclass(frozen=True, slots=True)
class MoeLayerView:
    """One mixture-of-experts layer, as its router sees it.

    name:        vLLM's name for it, as ``model.layers.3.mlp.experts``
    index:       the number of the decoder layer that it belongs to, counted from 0
    experts:     how many experts the router chooses from; shared ones, which every token passes, do not count
    top_k:       how many of them each token goes to
    hidden_size: the length of a token's hidden state
    """

    name: str
    index: int
    experts: int
    top_k: int
    hidden_size: int


class MoeRouter(Item):
    """Chooses the experts of each token, in place of the model's own rule. There is an instance for each layer::

        class Greedy(MoeRouter):
            def route(self, hidden, logits, top_k):
                weights, ids = logits.softmax(-1).topk(top_k)
                return ids, weights

    Tensors stay on their device, and what ``route`` is given must not be written to. A token's experts should depend on
    that token alone: otherwise its answer changes with the requests that happen to be in the same batch. So far routers
    are served on CPUs only, and refused on a GPU.

    Each layer's router is tried at the start, and one that raises or answers with something else than experts and
    weights stops it. One that does so later is put aside: its process goes on with the model's own rule, for all
    layers, and ``vllm-graft status`` shows it as quarantined.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {"layers": "all"}
    """Every router has this, whatever options it declares besides: the decoder layers that are meant, as ``all``,
    ``0-7`` or ``0-3, 8, 20-``."""

    layer: MoeLayerView
    """The layer of this instance, set before the first call."""
    stock: Callable[[torch.Tensor, torch.Tensor], Routes]
    """The model's own rule, set as ``layer`` is: ``self.stock(hidden, logits)`` returns ids and weights. Its weights
    are normalized and scaled as the model wants them."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that declares options of its own would lose the common one.
        cls.options = {**MoeRouter.options, **cls.options}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse layers that cannot be read; an override calls this one too."""
        parse_layers(str(options["layers"]))

    def route(self, hidden: torch.Tensor, logits: torch.Tensor, top_k: int) -> Routes:
        """Return the experts of each token and their weights, both ``[tokens, top_k]``.

        ``hidden`` is ``[tokens, hidden_size]`` and ``logits`` ``[tokens, experts]``: what the model's gate made of it.
        Ids are whole numbers from 0 to ``experts - 1``, weights finite floating-point numbers. A token that is to have
        fewer experts gets weight 0 for the others.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement route(hidden, logits, top_k)")
