"""``sink-window``: keep the first tokens of a request and a window of its last ones; free the KV cache between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from vllm_graft.contracts import KVPolicy, LayerView, OptionError, OptionValue, Window
from vllm_graft.contracts.layer_choice import parse_layers

NARROWEST: Final = 128
"""The smallest window that a request may ask for: two steps of 64 tokens, by which windows move."""


class SinkWindow(KVPolicy):
    """Gives layers with full attention a window, and lets them see the first tokens besides.

    sink_tokens: tokens at the start of a request that every later one sees; models put much of their attention there,
                 whatever stands there, and write nonsense without them
    window:      the most tokens before a token that it sees, itself included
    layers:      the layers that are meant, as ``all``, ``0-7`` or ``0-3, 8, 20-``
    default:     what requests have that do not ask for a window: ``window``, or ``full`` for full attention

    A request's memory does not grow beyond ``sink_tokens + window``. What has left the window is forgotten: a question
    about it cannot be answered.

    A request may ask for a narrower window with ``kv_window`` in its ``vllm_xargs``: from 128 tokens up to ``window``;
    any other value is refused with a 400.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {
        "sink_tokens": 64,
        "window": 4096,
        "layers": "all",
        "default": "window",
    }
    keys: ClassVar[Sequence[str]] = ("kv_window",)

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse numbers that are not a window, and layers that cannot be read."""
        sinks, window = options["sink_tokens"], options["window"]
        if not isinstance(sinks, int) or sinks < 0:
            raise OptionError(f"must be 0 or more tokens, but is {sinks!r}", option="sink_tokens")
        if not isinstance(window, int) or window < 1:
            raise OptionError(f"must be at least one token, but is {window!r}", option="window")
        if sinks > window:
            what = f"is {sinks}, more than the window of {window} tokens, which would slide over them"
            raise OptionError(what, option="sink_tokens", fix="make the window larger than sink_tokens")
        parse_layers(str(options["layers"]))
        if options["default"] not in ("window", "full"):
            what = f'must be "window" or "full", but is {options["default"]!r}'
            raise OptionError(what, option="default", fix='write "full" for a window on request alone')

    @classmethod
    def check_request(cls, keys: Mapping[str, object], options: Mapping[str, OptionValue]) -> None:
        """Refuse a ``kv_window`` that is not a number of tokens, too small, or more than the server's window."""
        own, most = keys["kv_window"], int(str(options["window"]))
        if isinstance(own, bool) or not isinstance(own, int) or not min(NARROWEST, most) <= own <= most:
            allowed = f"a whole number of tokens from {min(NARROWEST, most)} to {most}"
            raise ValueError(f"kv_window must be {allowed}, but is {str(own)[:60]!r}")

    def request_window(self, keys: Mapping[str, object]) -> int | None:
        """Return ``kv_window``."""
        own = keys.get("kv_window")
        return own if isinstance(own, int) else None

    def window(self, layer: LayerView) -> Window | None:
        """Return the window of a chosen layer; a window that the model itself gives the layer stays as it is."""
        if layer.index not in parse_layers(str(self.option("layers"))):
            return None
        if layer.window is not None:
            return Window(0, layer.window)
        last = layer.max_tokens if self.option("default") == "full" else int(str(self.option("window")))
        return Window(int(str(self.option("sink_tokens"))), last)
