"""A clean configuration for every test of this room: an empty working directory and none of our variables."""

from pathlib import Path

import pytest

from vllm_graft.testing.packages import lay_out

ITEMS = """
from vllm_graft import AdmissionQueue, Key, Sampler, SamplingStrategy, StatSink, VLLMPatch

class Sink(StatSink):
    options = {"path": "x", "count": 3, "ratio": 0.5, "loud": False, "tags": ["a"]}
    def finished(self, requests, batch): ...

class Other(StatSink):
    def finished(self, requests, batch): ...

class EnginePatch(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="engine-patch", processes={"engine"}):
    def graft_added(self):
        return 1

class Stepless(SamplingStrategy):
    keys = (Key("stepless", "bool", False, switch=True),)
    def open(self, slot, params): ...

class Keyless(Sampler):
    def sample(self, logits, params): ...

class DryToo(Sampler):
    keys = (Key("dry_too"), Key("other", aliases=("dry_base",)))
    def sample(self, logits, params): ...

class Deaf(StatSink):
    pass

class Endless(AdmissionQueue):
    def push(self, request): ...
    def peek(self): ...
    def pop(self): ...

NOT_A_CLASS = 3
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GRAFT_CONFIG", "VLLM_CUSTOM_PATCHES", "GRAFT_PLAN", "GRAFT_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A laid-out package that offers two sinks and a patch, and some that are broken."""
    folder = tmp_path / "site"
    entries = {
        "my-sink": "graft_offered:Sink",
        "other-sink": "graft_offered:Other",
        "engine-patch": "graft_offered:EnginePatch",
        "not-a-class": "graft_offered:NOT_A_CLASS",
        "gone": "graft_offered:Gone",
        "stepless": "graft_offered:Stepless",
        "keyless": "graft_offered:Keyless",
        "dry-too": "graft_offered:DryToo",
        "deaf": "graft_offered:Deaf",
        "endless": "graft_offered:Endless",
    }
    lay_out(folder, "graft-offered", {"vllm_graft.plugins": entries}, {"graft_offered": ITEMS})
    monkeypatch.syspath_prepend(str(folder))
    return folder
