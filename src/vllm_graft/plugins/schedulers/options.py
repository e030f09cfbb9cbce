"""Read number options, and refuse those outside their limits by name."""

from __future__ import annotations

import math

from vllm_graft.contracts import Item, OptionError


def number(item: Item, who: str, name: str, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """Return a number option from ``low`` to ``high``; ``above`` excludes ``low`` itself."""
    value = item.option(name)
    fits = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not fits or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low:g}" if above else f"at least {low:g}"
        most = f" and at most {high:g}" if math.isfinite(high) else ""
        raise OptionError(f"must be {least}{most}, but is {value!r}", option=name, item=who)
    return float(value)  # type: ignore[arg-type]


def integer(item: Item, who: str, name: str, low: int, high: int) -> int:
    """Return a whole-number option from ``low`` to ``high``."""
    value = number(item, who, name, low, high)
    if value != int(value):
        raise OptionError(f"must be a whole number, but is {value!r}", option=name, item=who)
    return int(value)
