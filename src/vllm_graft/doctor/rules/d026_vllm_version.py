"""D026: no vLLM, one outside the tested range, or a development build."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment, parse_version
from vllm_graft.findings import Finding
from vllm_graft.versions import TESTED_BELOW, TESTED_FROM, in_tested_range

CODE = "D026"
TITLE = "No vLLM, or one that is not tested"


def check(env: Environment) -> Iterator[Finding]:
    """Judge the version that vLLM's own files state; its metadata may name another."""
    where = str(env.root or sys.prefix)
    if env.root is None:
        what = "is not installed for this interpreter, so no plugin runs"
        yield Finding(CODE, "error", "vLLM", what, where, "install a vLLM build for your hardware")
        return
    if env.vllm is None:
        what = "does not state its version (there is no _version.py, as in a source tree that was never built)"
        yield Finding(CODE, "warning", "vLLM", what, where, "build or install it; patches depend on the version")
        return
    if not in_tested_range(env.vllm):
        what = f"{env.vllm} is outside the tested range {TESTED_FROM} to {TESTED_BELOW} (exclusive)"
        fix = "expect refusals by name, and test before production; or install a release of the range"
        yield Finding(CODE, "warning", "vLLM", what, where, fix)
    version = parse_version(env.vllm)
    is_built = version is not None and not version.is_prerelease and version.release >= (0, 1)
    # setuptools-scm puts the commit into the local part: 0.32.1.dev5+g1a2b3c4.
    if version is None or not is_built or (version.local or "").startswith("g"):
        what = f"{env.vllm} is a development build: between two releases, its code is that of neither"
        yield Finding(CODE, "info", "vLLM", what, where, "see `vllm-graft audit` for what has moved")
