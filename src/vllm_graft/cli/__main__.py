"""``python -m vllm_graft.cli``: the command, if its script is not on the path."""

import sys

from vllm_graft.cli import main

if __name__ == "__main__":
    sys.exit(main())
