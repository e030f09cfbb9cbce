"""The base of strategies that look for matches: the window, and the choice of where the work is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vllm_graft.contracts import OptionError, OptionValue, Rows, SamplingStrategy, ServedModel
from vllm_graft.contracts.kernels import has_triton, warm_up

if TYPE_CHECKING:
    import torch

_WIDEST: Final = 2**31 - 1
"""The greatest window: the kernels count tokens in 32 bits. A device's memory sets a far lower limit."""


class MatchingStrategy(SamplingStrategy):
    """Changes the logits of tokens that followed earlier occurrences of a text's end.

    item: the name of the item in a plan

    Option ``window``: how many of the last tokens are looked at.
    """

    item: ClassVar[str]
    options: ClassVar[Mapping[str, OptionValue]] = {"window": 4096}
    stage = "penalty"
    # It only lowers logits, and lowers none before all changes are known.
    atomic = True

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        super().__init__(options)
        self.window = self._read_window(self.option("window"))

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse a window in which no match fits."""
        super().check_options(options)
        cls._read_window(options["window"])

    @classmethod
    def _read_window(cls, value: OptionValue) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            raise OptionError(f"must be at least 2, but is {value!r}", option="window", item=cls.item, fix="raise it")
        if value > _WIDEST:
            raise OptionError(
                f"must be at most {_WIDEST}, but is {value!r}", option="window", item=cls.item, fix="lower it"
            )
        return value

    def setup(self, model: ServedModel) -> None:
        """Make the tables of all requests: the token set and the window of each slot."""
        import torch

        from vllm_graft.plugins.samplers.matching.sets import TokenSets

        self._vocabulary = model.vocabulary
        self._sets = TokenSets(model)
        self._windows = model.per_slot(0, integer=True)

        def change(logits: torch.Tensor, rows: Rows) -> None:
            no_tokens = torch.full((1, self.window), -1, dtype=torch.int32, device=model.device)
            self._change_by_kernel(logits, rows, no_tokens)

        warm_up(model, change)

    def _tables(self) -> dict[str, Any]:
        """Return the arguments that the kernels of both strategies take, an entry for each slot in the tensors."""
        return {
            "windows": self._windows.all(),
            "sets": self._sets.table,
            "set_of_slot": self._sets.of_slot.all(),
            "vocabulary": self._vocabulary,
        }

    def step(self, logits: torch.Tensor, rows: Rows) -> None:
        """Change the logits where the tokens are: from the host's lists, by Triton or by torch."""
        if rows.history.on_host:
            self._change_from_host(logits, rows)
            return
        tokens = rows.history.tokens(rows, self.window)
        if has_triton(logits):
            self._change_by_kernel(logits, rows, tokens)
        else:
            self._change_by_torch(logits, rows, tokens)

    def _change_from_host(self, logits: torch.Tensor, rows: Rows) -> None:
        """Find matches on the host, and send the few changes that follow from them."""
        raise NotImplementedError

    def _change_by_torch(self, logits: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> None:
        raise NotImplementedError

    def _change_by_kernel(self, logits: torch.Tensor, rows: Rows, tokens: torch.Tensor) -> None:
        raise NotImplementedError
