"""Matches: places where the end of a text occurred before in it, and the tokens that came next there.

For every token of a text's window: how many tokens right before it equal the text's end. Such a match ends at a
breaker, at the window's start and at ``MAX_MATCH``. If the tokens are lists on the host, ``host`` keeps up with them
token by token; if they are on the device, ``by_torch`` and ``kernels`` compute all from the tokens alone in each
step, so that drafts, resumed requests and steps computed twice need no thought.

- ``strategy``  what strategies that look for matches share
- ``host``      one request's matches, kept up on the host
- ``by_torch``  matches of many rows and the changes that follow, by torch
- ``kernels``   matches of many rows and the changes that follow, by Triton
- ``sets``      sets of tokens for each slot, on the device
- ``breakers``  which tokens contain a text
"""

from typing import Final

MAX_MATCH: Final = 128
"""Longer matches count as this long."""
