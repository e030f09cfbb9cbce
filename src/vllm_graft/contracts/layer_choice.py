"""The option ``layers``: which layers of a model are meant."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_graft.errors import OptionError


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Ranges of layer numbers, both ends included; ``None`` is the last layer."""

    ranges: tuple[tuple[int, int | None], ...]

    def __contains__(self, index: int) -> bool:
        return any(low <= index and (high is None or index <= high) for low, high in self.ranges)


def parse_layers(text: str) -> LayerChoice:
    """Read ``all``, ``0-7`` or ``0-3, 8, 20-``; raise OptionError for anything else."""
    if text.strip() == "all":
        return LayerChoice(((0, None),))
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        low, dash, high = (piece.strip() for piece in part.partition("-"))
        if not low.isdecimal() or (high and not high.isdecimal()) or (high and int(high) < int(low)):
            what = f"has {part.strip()!r}, which is neither a layer nor a range of layers"
            raise OptionError(what, option="layers", fix='write "all", "0-7" or "0-3, 8, 20-"')
        ranges.append((int(low), int(high) if high else None if dash else int(low)))
    return LayerChoice(tuple(ranges))
