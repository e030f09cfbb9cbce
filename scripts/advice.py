"""Advice for known failures in pip's output."""

from __future__ import annotations

import re

NEEDED_GB = 5

# The first match counts; {command} stands for the command that failed.
_HINTS = (
    (
        r"No space left on device",
        f"free {NEEDED_GB} GB, or use larger disks: TMPDIR=/big/tmp GRAFT_CACHE_DIR=/big/cache {{command}} "
        "VENV=/big/venv",
    ),
    (r"CERTIFICATE_VERIFY_FAILED|SSLError", "name your certificates: PIP_CERT=/path/to/bundle.pem {command}"),
    (r"ProxyError|Proxy Authentication", "correct the proxy: HTTPS_PROXY=http://user:password@host:port {command}"),
    (
        r"NewConnectionError|NameResolutionError|Max retries|timed out|unreachable|ConnectionError|from versions: none",
        "check the network; behind a proxy: HTTPS_PROXY=http://host:port {command}; with an index of your own: "
        "PIP_INDEX_URL=https://host/simple {command}; without any network: see docs/how-to/set-up.md",
    ),
    (
        r"No matching distribution found for torch",
        "torch has no wheel for this Python or machine: `make clean`, then `make setup PYTHON=python3.11`",
    ),
    (
        r"No matching distribution found",
        "your package index lacks that version; add one that has it: PIP_EXTRA_INDEX_URL=https://host/path {command}",
    ),
)


def advice(output: str, command: str) -> str | None:
    """Return the next step after a failed pip, or None if its output has no known failure."""
    found = (hint for sign, hint in _HINTS if re.search(sign, output))
    return next((hint.format(command=command) for hint in found), None)
