"""The fixture that plugin authors use: the real engine in this process, put back afterwards, twice with two plans."""

import os
import sys
import time

import pytest

from vllm_graft.testing import Session, assert_active, assert_called, tiny_model

PATCHES = """
from vllm_graft import VLLMPatch, wrap

class Front(VLLMPatch["vllm.v1.engine.llm_engine:LLMEngine"], name="front", processes={"frontend"}):
    @wrap
    def step(self):
        return self._original_step()

class Engine(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="engine", processes={"engine"}):
    @wrap
    def schedule(self, *args, **kwargs):
        return self._original_schedule(*args, **kwargs)
"""


@pytest.fixture
def patched(graft: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A package with one patch for the front end and one for the engine, seen by this process too."""
    entries = {"front": "session_patches:Front", "engine": "session_patches:Engine"}
    graft.package("session-patches", {"vllm_graft.plugins": entries}, {"session_patches": PATCHES})
    monkeypatch.syspath_prepend(str(graft.site))
    return graft


@pytest.mark.engine
@pytest.mark.compiled
def test_two_engines_with_two_plans_one_after_the_other(patched: Session):
    """LLM() in this process picks the plan up; afterwards targets, environment and records are as before."""
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    before, finders, init = LLMEngine.step, list(sys.meta_path), LLMEngine.__init__
    for plan, item in (('patches = ["front"]', "front"), ('patches = ["engine"]', "engine")):
        patched.plan(f"[defaults]\n{plan}\n")
        with patched.llm() as llm:
            llm.generate("hi", SamplingParams(max_tokens=3))
            (view,) = patched.views()
            assert_active(view, item)
            assert_called(view, item, at_least=3)
            with pytest.raises(AssertionError, match="is not in the plan"):
                assert_active(view, "front" if item == "engine" else "engine")
            assert [name for name in os.environ if name.startswith("GRAFT_PLAN")] == ["GRAFT_PLAN"]
        assert LLMEngine.step is before
        assert "GRAFT_PLAN" not in os.environ
        assert sys.meta_path == finders, "nothing of ours watches imports"
        assert LLMEngine.__init__ is init
    deadline = time.monotonic() + 30
    while patched.views() and time.monotonic() < deadline:
        time.sleep(0.1)  # vLLM does not wait for engine core to be gone
    assert patched.views() == []


def test_assertions_say_what_is_missing(graft: Session):
    """No record is not the same as everything fine."""
    with pytest.raises(AssertionError, match="the server left no record"):
        assert_active(None, "front")
    with pytest.raises(AssertionError, match="the server left no record"):
        assert_called(None, "front")


def test_a_script_knows_the_model_and_the_environment(graft: Session):
    """What a script sees is what its children will."""
    graft.simulate()
    done = graft.script("import os\nprint(MODEL, os.environ['GRAFT_SIMULATE'], os.environ['GRAFT_STATE_DIR'])")
    assert done.stdout.split() == [str(tiny_model()), "instant", str(graft.folder / "state")]
