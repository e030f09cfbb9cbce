"""The weights of a checkpoint on their way into a model: their names mapped, and the last one remembered.

What a model's ``load_weights`` raises for a weight of the wrong shape does not name it, in most of vLLM's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch


_EXPERTS: Final = ".routed_experts."


class WeightReader:
    """Reads the weights of one checkpoint."""

    def __init__(self, mapping: Mapping[str, str | None]) -> None:
        self._prefixes = sorted(mapping.items(), key=lambda entry: -len(entry[0]))
        self.current = ""
        """The weight that was read last, with its shape; empty before the first and after the last."""
        self.missing: set[str] | None = None
        """The parameters that no weight was read into; None until a class has said which it loaded."""

    def rename(self, name: str) -> str | None:
        """Return a weight's name in the model; None if it is left out."""
        for prefix, replacement in self._prefixes:
            if name.startswith(prefix):
                return None if replacement is None else replacement + name.removeprefix(prefix)
        return name

    def read(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights under their names in the model."""
        for name, weight in weights:
            renamed = self.rename(name)
            if renamed is None:
                continue
            as_name = f", read as {renamed}" if renamed != name else ""
            self.current = f"{name} of the shape {list(getattr(weight, 'shape', []))}{as_name}"
            yield renamed, weight
        self.current = ""

    def note(self, parameters: set[str], loaded: object) -> None:
        """Take in the names of a model's parameters, and what its ``load_weights`` says it has loaded."""
        if isinstance(loaded, Set):
            # Up to 0.27, experts report their weights without the name of the module that they are in.
            known = {name.replace(_EXPERTS, ".") for name in loaded}
            left = parameters if self.missing is None else self.missing
            self.missing = {name for name in left if name.replace(_EXPERTS, ".") not in known}


@contextmanager
def reading(kind: type, mapping: Mapping[str, str | None]) -> Iterator[WeightReader]:
    """Have a class read its weights through a reader until the block ends, whichever loader of vLLM's calls it."""
    reader = WeightReader(mapping)
    own = vars(kind).get("load_weights")
    original = getattr(kind, "load_weights")  # noqa: B009 - a class of the author's

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        # Asked now: when a model is loaded, kernels may have packed them into others.
        parameters = {name for name, _ in self.named_parameters()}
        loaded = original(self, reader.read(weights), *args, **kwargs)
        reader.note(parameters, loaded)
        return loaded

    setattr(kind, "load_weights", load_weights)  # noqa: B010
    try:
        yield reader
    finally:
        if own is None:
            delattr(kind, "load_weights")
        else:
            setattr(kind, "load_weights", own)  # noqa: B010
