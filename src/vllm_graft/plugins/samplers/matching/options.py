"""The option that strategies of this room share."""

from __future__ import annotations

from vllm_graft.contracts.item import OptionValue
from vllm_graft.errors import OptionError


def read_window(value: OptionValue, name: str) -> int:
    """The option ``window`` of the item ``name``; an error where no text fits in."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise OptionError(f"must be at least 2, and is {value!r}", option="window", item=name, fix="raise it")
    return value
