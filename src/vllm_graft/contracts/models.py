"""The model contract: an architecture of your own, or vLLM's class for one under another name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_graft.contracts.item import Item, OptionValue


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model that is about to be served, as a plugin's ``check`` is given it.

    name:              the model's name or path, as it was given
    architecture:      the name in its ``config.json`` that the plugin registers
    config:            its ``config.json``, as a dictionary
    dtype:             the type of its weights in memory, such as ``bfloat16``
    quantization:      vLLM's name for the quantization of the weights; None if there is none
    tensor_parallel:   the workers that share each layer
    pipeline_parallel: the stages that the layers are divided into
    """

    name: str
    architecture: str
    config: Mapping[str, object]
    dtype: str
    quantization: str | None
    tensor_parallel: int
    pipeline_parallel: int


class ModelPlugin(Item):
    """Names a model class for vLLM to build; the class itself is written against vLLM's layers::

        class AcmeMoe(ModelPlugin):
            architectures = ("AcmeMoeForCausalLM",)
            model = "acme_graft.moe:AcmeMoeForCausalLM"

    The class is named and not imported: it is loaded in the workers, and in the subprocess in which vLLM inspects it,
    where its methods are compared with what the installed vLLM calls. A plugin that names one of vLLM's own classes
    serves a checkpoint with other names, without any model code.

    An architecture that vLLM has already is refused unless the plan sets ``replace = true`` in the item's options.
    """

    architectures: ClassVar[Sequence[str]] = ()
    """The names in ``architectures`` of a ``config.json`` that the class is for."""
    model: ClassVar[str] = ""
    """The class, as ``module:Class``."""
    config: ClassVar[str] = ""
    """The class of the configuration, as ``module:Class``, for a ``model_type`` that transformers does not know."""
    weights: ClassVar[Mapping[str, str | None]] = {}
    """Beginnings of the checkpoint's weight names, each with its replacement; None leaves those weights out. The
    longest that fits counts."""

    options: ClassVar[Mapping[str, OptionValue]] = {"replace": False}
    """Every plugin has this, whatever options it declares besides: whether it wins over a class of the same name."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that declares options of its own would lose the common one.
        cls.options = {**ModelPlugin.options, **cls.options}

    def check(self, model: ModelView) -> None:
        """Optional: refuse a model that the class cannot serve, with a ValueError, before the engine starts.

        Called in the front end, if one of ``architectures`` is the model's.
        """
