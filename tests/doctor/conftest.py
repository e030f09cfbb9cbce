"""Environments laid out in a folder: real distributions, seen through importlib as installed ones are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_graft.doctor import Facts, examine
from vllm_graft.findings import Finding
from vllm_graft.testing.packages import lay_out


class Site:
    """A folder of distributions, and the variables and arguments that a server would be started with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = [str(folder)]
        self.environ: dict[str, str] = {}
        self.arguments: list[str] = []

    def package(self, name: str, entries: dict[str, dict[str, str]], modules: dict[str, str] | None = None) -> None:
        """Lay a distribution out; ``entries`` is group to name to "module:object"."""
        lay_out(self.folder, name, entries, modules)

    def facts(self) -> Facts:
        """What the rules see."""
        return Facts.gather(self.arguments, path=self.path, environ=self.environ)

    def found(self, code: str) -> list[Finding]:
        """What one rule says."""
        return [finding for finding in examine(self.facts()) if finding.code == code]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty environment beside the installed vLLM."""
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder)


@pytest.fixture
def clean(site: Site) -> Callable[[], list[Finding]]:
    """A set-up without a fault: one general plugin, nothing set; every rule is silent on it."""
    site.package(
        "fine", {"vllm.general_plugins": {"fine": "fine_plugin:register"}}, {"fine_plugin": "def register(): ...\n"}
    )
    return lambda: examine(site.facts())
