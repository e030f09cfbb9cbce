"""Attention over a window, beside stock vLLM.

    PYTHONPATH=src:SITE python -m benchmarks.attention layer   [--json FILE]   # one layer of a decode step
    PYTHONPATH=src:SITE python -m benchmarks.attention serving [--json FILE]   # long chats, end to end
    PYTHONPATH=src:SITE python -m benchmarks.attention tokens MODEL [--json FILE]  # the answers, against a reference

They need a GPU; SITE holds a CUDA build of vLLM 0.32. What an H200 gave lies beside this file.
"""

from __future__ import annotations

import sys

from benchmarks.attention import layer, serving, tokens


def main() -> None:
    ways = {"layer": layer.main, "serving": serving.main, "tokens": tokens.main}
    if len(sys.argv) < 2 or sys.argv[1] not in ways:
        sys.exit(__doc__)
    ways[sys.argv.pop(1)]()


if __name__ == "__main__":
    main()
