"""Attention over a window, beside stock vLLM.

    PYTHONPATH=src:SITE python -m benchmarks.attention layer   [--json FILE]   # one layer of a decode step
    PYTHONPATH=src:SITE python -m benchmarks.attention serving [--json FILE]   # long chats, end to end
    PYTHONPATH=src:SITE python -m benchmarks.attention tokens MODEL [--json FILE]  # the answers, against a reference
    python -m benchmarks.attention quality [--json FILE] [--model DIR]         # what is lost with the tokens

The first three need a GPU; SITE holds a CUDA build of vLLM 0.32. The last needs neither. Records lie beside this file.
"""

from __future__ import annotations

import sys
from importlib import import_module

WAYS = ("layer", "serving", "tokens", "quality")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in WAYS:
        sys.exit(__doc__)
    # Late: each needs other packages than the rest.
    import_module(f"benchmarks.attention.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
