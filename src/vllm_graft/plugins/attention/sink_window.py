"""``sink-window``: keep the first tokens of a request and a window of its last ones; free the KV cache between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vllm_graft.contracts import KVPolicy, LayerView, OptionError, OptionValue, Window
from vllm_graft.plugins.attention.layer_choice import parse_layers


class SinkWindow(KVPolicy):
    """Gives layers with full attention a window, and lets them see the first tokens besides.

    sink_tokens: tokens at the start of a request that every later one sees; models put much of their attention there,
                 whatever stands there, and write nonsense without them
    window:      the most tokens before a token that it sees, itself included
    layers:      the layers that are meant, as ``all``, ``0-7`` or ``0-3, 8, 20-``

    A request's memory does not grow beyond ``sink_tokens + window``. What has left the window is forgotten: a question
    about it cannot be answered.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {"sink_tokens": 64, "window": 4096, "layers": "all"}

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse numbers that are no window, and layers that cannot be read."""
        sinks, window = options["sink_tokens"], options["window"]
        if not isinstance(sinks, int) or sinks < 0:
            raise OptionError(f"must be 0 or more tokens, and is {sinks!r}", option="sink_tokens")
        if not isinstance(window, int) or window < 1:
            raise OptionError(f"must be at least one token, and is {window!r}", option="window")
        if sinks > window:
            what = f"is {sinks}, more than the window of {window} tokens, which would slide over them"
            raise OptionError(what, option="sink_tokens", fix="make the window larger than sink_tokens")
        parse_layers(str(options["layers"]))

    def window(self, layer: LayerView) -> Window | None:
        """Return the window of a chosen layer; a window that the model itself gives the layer stays as it is."""
        if layer.index not in parse_layers(str(self.option("layers"))):
            return None
        if layer.window is not None:
            return Window(0, layer.window)
        return Window(int(str(self.option("sink_tokens"))), int(str(self.option("window"))))
