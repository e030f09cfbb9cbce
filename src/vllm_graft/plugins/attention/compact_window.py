"""``compact-window``: the sliding window of the model itself, with the same results and less work for the kernel."""

from __future__ import annotations

from vllm_graft.contracts import KVPolicy, LayerView, Window


class CompactWindow(KVPolicy):
    """Hands the kernel a block table that begins at the window, for the layers to which the model gives one.

    A stock kernel is handed the table of the whole sequence and skips what is outside the window. With nothing to skip
    it splits its work evenly over the device.
    """

    def window(self, layer: LayerView) -> Window | None:
        """Return the layer's own window; None for full attention."""
        return Window(0, layer.window) if layer.window is not None else None
