"""Where the end of a text occurred before in it, and which tokens came next there.

For every token of a text's window: how many tokens right before it equal the text's end. Such a match ends at a
breaker, at the window's start and at ``LONGEST``. Where the tokens are lists on the host, ``host`` keeps up with them
token by token; where they are on the device, ``lengths`` and ``kernels`` compute all from the tokens alone, step by
step, so that drafts, resumed requests and steps computed twice need no thought.

- ``host``     one request's matches, kept up on the host
- ``dense``    the same where there are many
- ``lengths``  all matches of many rows, by torch
- ``kernels``  the same by Triton, with the changes that follow from them
- ``writes``   few changes in many logits, by torch
- ``sets``     sets of tokens for each slot, on the device
- ``breakers`` which tokens contain a text
"""

from typing import Final

from vllm_graft.contracts import OptionError, OptionValue

LONGEST: Final = 128
"""Longer matches count as this long."""


def read_window(value: OptionValue, name: str) -> int:
    """Return the option ``window`` of the item ``name``; raise an error where no match fits into it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise OptionError(f"must be at least 2, and is {value!r}", option="window", item=name, fix="raise it")
    return value
