"""``scored-blocks``: keep the share of a request's KV blocks that draw the most attention; free the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from vllm_graft.contracts import KVPolicy, LayerView, OptionError, OptionValue, RequestBlocks
from vllm_graft.contracts.layer_choice import parse_layers


class ScoredBlocks(KVPolicy):
    """Keeps a share of each request's blocks: the first, the recent, and of the others those with the best scores.

    keep:       the share of a request's blocks that stays, above 0 and up to 1
    first:      tokens at the start of a request that always stay, rounded up to whole blocks
    recent:     its last tokens, which always stay, rounded up to whole blocks
    min_tokens: a request with fewer tokens keeps everything
    every:      steps of decoding between two scorings
    layers:     the layers that score, as ``all``, ``8`` or ``8, 12-13``; ``auto`` takes two, in the middle and at three
                quarters of the model. Each takes the memory of one token more for every block of its KV cache, beyond
                what vLLM has set aside

    A block's score is the attention that its mean key draws from the tokens that the request writes, averaged over the
    last scorings. Prompts are read in full: blocks are freed once the request decodes, down to the share each time it
    has filled a block. A block that was not scored yet counts as the best. ``first`` and ``recent`` stay even if
    they are more than the share. What was freed is gone for all layers, and does not come back if it matters later.

    A request may ask for a smaller share with ``kv_keep`` in its ``vllm_xargs``, above 0 and up to ``keep``; any other
    value is refused with a 400.
    """

    options: ClassVar[Mapping[str, OptionValue]] = {
        "keep": 0.5,
        "first": 64,
        "recent": 256,
        "min_tokens": 1024,
        "every": 16,
        "layers": "auto",
    }
    wants_scores: ClassVar[bool] = True
    keys: ClassVar[Sequence[str]] = ("kv_keep",)

    def __init__(self, options: Mapping[str, OptionValue] | None = None) -> None:
        super().__init__(options)
        self.score_every = int(str(self.option("every")))
        self._keep = float(str(self.option("keep")))
        layers = str(self.option("layers"))
        self._layers = None if layers.strip() == "auto" else parse_layers(layers)

    @classmethod
    def check_options(cls, options: Mapping[str, OptionValue]) -> None:
        """Refuse a share that keeps nothing or more than there is, numbers below 0, and layers that cannot be read."""
        keep = options["keep"]
        if not isinstance(keep, int | float) or not 0 < keep <= 1:
            what = f"must be a share of the blocks, above 0 and up to 1, but is {keep!r}"
            raise OptionError(what, option="keep", fix="write 0.5 to keep half of them")
        for name, least in (("first", 0), ("recent", 1), ("min_tokens", 0), ("every", 1)):
            value = options[name]
            if not isinstance(value, int) or value < least:
                unit = "steps" if name == "every" else "tokens"
                raise OptionError(f"must be {least} or more {unit}, but is {value!r}", option=name)
        if str(options["layers"]).strip() != "auto":
            parse_layers(str(options["layers"]))

    @classmethod
    def check_request(cls, keys: Mapping[str, object], options: Mapping[str, OptionValue]) -> None:
        """Refuse a ``kv_keep`` that is not a share, or more than the server keeps."""
        own, most = keys["kv_keep"], float(str(options["keep"]))
        if isinstance(own, bool) or not isinstance(own, int | float) or not 0 < own <= most:
            raise ValueError(f"kv_keep must be a number above 0 and up to {most:g}, but is {str(own)[:60]!r}")

    def scores_layer(self, layer: LayerView) -> bool:
        """Return whether a layer is one of ``layers``."""
        return super().scores_layer(layer) if self._layers is None else layer.index in self._layers

    def evict(self, request: RequestBlocks) -> Collection[int]:
        """Return the blocks with the lowest scores, as many as the request has above its share."""
        if request.tokens < int(str(self.option("min_tokens"))):
            return ()
        filled = request.tokens // request.block_size
        first = math.ceil(int(str(self.option("first"))) / request.block_size)
        recent = math.ceil(int(str(self.option("recent"))) / request.block_size)
        own = request.keys.get("kv_keep")
        keep = min(self._keep, own) if isinstance(own, int | float) else self._keep
        allowed = max(math.ceil(keep * filled), first + recent)
        excess = sum(block < filled for block in request.held) - allowed
        if excess <= 0:
            return ()
        scores = request.scores
        between = [block for block in request.evictable if first <= block < filled - recent and block in scores]
        return sorted(between, key=lambda block: scores[block])[:excess]
