"""Environments laid out in a folder: real distributions, seen through importlib as installed ones are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.doctor import Environment, examine
from vllm_graft.findings import Finding
from vllm_graft.testing import zygote
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

    def environment(self) -> Environment:
        """What the rules see."""
        return Environment.gather(self.arguments, path=self.path, variables=self.environ)

    def found(self, code: str) -> list[Finding]:
        """What one rule says."""
        return [finding for finding in examine(self.environment()) if finding.code == code]


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
    return lambda: examine(site.environment())


WORKER = """
import asyncio, importlib, json, logging, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import vllm.plugins
from vllm.platforms import current_platform
current_platform.device_type
os.environ.pop("GRAFT_SIMULATE")

class Keep(logging.Handler):
    def emit(self, record):
        raised = f" ({record.exc_info[1]!r})" if record.exc_info else ""
        lines.append(f"{record.levelname} {record.getMessage()}{raised}")

lines = []
logging.getLogger("vllm").addHandler(Keep(logging.INFO))
for line in sys.stdin:
    task = json.loads(line)
    environ, path, modules = dict(os.environ), list(sys.path), set(sys.modules)
    lines.clear()
    os.environ.update(task["environ"])
    sys.path[:0] = task["path"]
    importlib.invalidate_caches()
    vllm.plugins.plugins_loaded = False
    scope, error = {"answer": None}, ""
    try:
        exec(task["code"], scope)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exc()
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(set(task["path"]) - set(path))):
            del sys.modules[name]
    print(json.dumps({"value": scope["answer"], "error": error, "log": lines}, default=str), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What came of code beside the real vLLM: its value, what it raised, what vLLM logged at its default level."""

    value: Any
    error: str
    log: list[str]


class Beside:
    """A set-up under two pairs of eyes: the real vLLM's, in a child that has imported it, and the doctor's."""

    def __init__(self, site: Site, child: subprocess.Popen[str]) -> None:
        self.site = site
        self._child = child

    def vllm(self, code: str) -> Answer:
        """Run code in the child, with the site's folders on its path and its variables set; `answer` is its value."""
        task = {"code": code, "environ": self.site.environ, "path": [place for place in self.site.path if place]}
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps(task), file=self._child.stdin, flush=True)
        return Answer(**json.loads(self._child.stdout.readline()))

    def plugins(self, group: str = "vllm.general_plugins") -> Answer:
        """The names that vLLM's own loader gives for a group."""
        return self.vllm(f"from vllm.plugins import load_plugins_by_group as load\nanswer = sorted(load({group!r}))")


@pytest.fixture(scope="session")
def vllm_child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """One process for all tests, in which the real vLLM is imported once."""
    folder = tmp_path_factory.mktemp("child")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_PLUGINS", "GRAFT_"))}
    with (folder / "child.txt").open("w") as log:
        child = zygote.ForkedPopen(
            [sys.executable, "-c", WORKER],
            env={**env, "GRAFT_SIMULATE": "1"},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        yield child
        child.communicate(timeout=60)


@pytest.fixture
def beside(site: Site, vllm_child: subprocess.Popen[str]) -> Beside:
    """The site, and the real vLLM beside it."""
    return Beside(site, vllm_child)
