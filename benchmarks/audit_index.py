"""What reading a release that is not installed costs: seconds, requests and bytes, against the real package index.

    python benchmarks/audit_index.py [0.31.0] [--compare FOLDER] [MODULE ...]

The index is the one that pip is set to use. The modules default to some that patches stand on. ``--compare`` names a
folder that holds vllm/ and says how many Python files there are equal to those read by ranges. Nothing is kept.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from vllm_graft.audit.releases.package_index import PackageIndex, client
from vllm_graft.audit.releases.wheels import RemoteWheel
from vllm_graft.sources import Tree

TARGETS = (
    "vllm.config.vllm",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.sample.sampler",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", default="0.31.0")
    parser.add_argument("modules", nargs="*", default=TARGETS)
    parser.add_argument("--compare", type=Path, help="a folder that holds vllm/")
    asked = parser.parse_args()

    row("step", "seconds", "requests", "MB")
    began = time.perf_counter()
    index = PackageIndex(client())
    row("session", f"{time.perf_counter() - began:.2f}", "-", "-")
    began = time.perf_counter()
    link = index.wheel(asked.version)
    row("index lookup", f"{time.perf_counter() - began:.2f}", str(len(index.client.indexes)), "-")

    remote = RemoteWheel(link.url, version=link.version, size=link.size, http=index.client)
    measured("directory", remote, remote.modules)
    measured(f"{len(asked.modules)} modules", remote, lambda: remote.fetch(asked.modules))
    measured(f"all {len(remote.modules())} modules", remote, lambda: remote.fetch(remote.modules()))
    print(f"\n{link.filename}: {remote.size / 1e6:.1f} MB; {type(index.client).__name__}")
    if asked.compare:
        compare(remote, Tree(asked.compare))
    return 0


def measured(name, remote, work):
    requests, came, began = remote.requests, remote.bytes, time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    row(name, f"{seconds:.2f}", str(remote.requests - requests), f"{(remote.bytes - came) / 1e6:.2f}")


def compare(remote, tree):
    here, there = set(tree.modules()), set(remote.modules())
    differing = [name for name in sorted(here & there) if tree.read(name).text != remote.read(name).text]
    print(f"{len(here & there)} modules in both, {len(differing)} differ: {', '.join(differing) or '-'}")
    print(f"only in the wheel: {rooms(there - here)}")
    print(f"only in the folder: {rooms(here - there)}")


def rooms(modules):
    """Modules counted by the packages that they are in."""
    counted = Counter(".".join(name.split(".")[:3]) for name in modules)
    return ", ".join(f"{name} ({count})" for name, count in counted.most_common()) or "-"


def row(*cells: str) -> None:
    print(f"{cells[0]:20s}" + "".join(f"{cell:>10s}" for cell in cells[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
