"""A model class compared with what the installed vLLM calls on it, by vLLM's own protocols for models."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.contracts.validation import Mistake


def find_model_mistake(kind: type) -> Mistake | None:
    """Return the first mistake in a model class; None if the installed vLLM can build, load and run it."""
    return next(_mistakes(kind), None)


def _mistakes(kind: type) -> Iterator[Mistake]:
    from torch import nn
    from vllm.model_executor.models import interfaces_base as interfaces

    if not issubclass(kind, nn.Module):
        yield Mistake("is not a torch.nn.Module", "derive it from torch.nn.Module")
    pooling = interfaces.is_pooling_model(kind)
    # Read off the protocols, whose methods have had other names: embed_input_ids was get_input_embeddings.
    called = _methods(interfaces.VllmModel)
    called += [name for name in _methods(interfaces.VllmModelForTextGeneration) if name not in called and not pooling]
    missing = [name for name in (*called, "load_weights") if not callable(getattr(kind, name, None))]
    # Every nn.Module has a forward, which raises.
    if getattr(kind, "forward", None) is getattr(nn.Module, "forward", None):
        missing.append("forward")
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        yield Mistake(f"lacks what this vLLM calls on a model: {names}", f"implement {names}")
    for name, wanted in (("__init__", ("vllm_config", "prefix")), ("forward", ("input_ids", "positions"))):
        yield from _arguments(kind, name, wanted)
    if not interfaces.is_vllm_model(kind) or not (pooling or interfaces.is_text_generation_model(kind)):
        # A rule of a later vLLM, which says more in its log.
        yield Mistake("is not a model to this vLLM", "see vllm.model_executor.models.interfaces_base for what it asks")


def _methods(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]


def _arguments(kind: type, method: str, wanted: tuple[str, ...]) -> Iterator[Mistake]:
    from vllm.model_executor.models.interfaces_base import supports_kw

    if missing := [each for each in wanted if not supports_kw(getattr(kind, method), each)]:
        names = ", ".join(missing)
        yield Mistake(f"has {method}() without the arguments {names}, which vLLM passes by name", f"add {names}")
