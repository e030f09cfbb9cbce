"""Starts that must fail, on the simulated accelerator: the last line names who, what and the next step."""

import re
import subprocess

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

START = """
from vllm import LLM
LLM(MODEL, max_model_len=256)
"""


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line a failed script said."""
    assert done.returncode != 0, done.stdout[-2000:]
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_that_cannot_apply_an_item_stops_the_start(simulated: Session, method: str):
    """multiprocessing swallows what is raised right after a fork; the engine that is made next raises it again."""
    simulated.plan('[defaults]\npatches = ["wrong-method"]\n')
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = method
    line = last_line(simulated.script(START))
    assert "EngineCore (engine" in line
    assert "patch wrong-method is refused" in line
    assert "'shedule'" in line
    assert "(did you mean 'schedule'?)" in line
    assert "Next: " in line


@pytest.mark.parametrize("method", ["in place", "spawn"])
def test_every_refused_patch_is_named(simulated: Session, method: str):
    """In one line, each with its reason and next step, wherever they were refused."""
    simulated.package("more-patches", {"vllm_graft.plugins": {"no-arguments": "more_patches:NoArguments"}}, MORE)
    simulated.plan('[defaults]\npatches = ["wrong-method", "no-arguments"]\n')
    if method == "in place":
        simulated.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = method
    line = last_line(simulated.script(START))
    for name, reason in (("wrong-method", "there is no 'shedule'"), ("no-arguments", "it has no place for 'request'")):
        assert re.search(rf"patch '?{name}'?.*{reason}.*Next: ", line), line
    assert "The hook is add_request(self, call), upstream's is add_request(self, request" in line


MORE = {
    "more_patches": """
from vllm_graft import VLLMPatch, wrap

class NoArguments(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="no-arguments", processes={"engine"}):
    @wrap
    def add_request(self, call):
        return call()
"""
}


def test_a_late_patch_stops_the_start(simulated: Session):
    """A spawned engine calls plugins from inside EngineCore.__init__: patching that comes too late, and we say so."""
    simulated.plan('[defaults]\npatches = ["too-late"]\n')
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    line = last_line(simulated.script(START))
    assert "EngineCore (engine+worker, pid " in line
    assert "patch too-late is late: EngineCore.__init__" in line
    assert "Next: " in line


def test_a_config_built_by_hand_is_noticed(simulated: Session):
    """A VllmConfig that did not come through create_engine_config has no plan in it."""
    script = """
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
import os
args = EngineArgs(model=MODEL, max_model_len=256)
os.environ["GRAFT_DISABLE"] = "1"
config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
del os.environ["GRAFT_DISABLE"]
LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=MULTI)
"""
    simulated.env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    for multi in ("True", "False"):
        done = simulated.script(script.replace("MULTI", multi))
        assert done.returncode != 0
        assert "this engine's VllmConfig was built by hand, so its plan (on-engine" in done.stderr
        assert "Next: build the configuration with EngineArgs(...).create_engine_config()" in done.stderr


def test_two_plans_in_one_process_are_refused(simulated: Session):
    """Patches belong to a process; the same plan twice is fine, and so is registering again and again."""
    simulated.plan(
        '[[profile]]\nmodel = "*"\npatches = ["on-engine"]\n[[profile]]\nmodel = "second"\npatches = ["everywhere"]\n'
    )
    script = """
import vllm_graft.boot
for _ in range(3):
    vllm_graft.boot.register()
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=MODEL, max_model_len=256).create_engine_config()
EngineArgs(model=MODEL, max_model_len=128).create_engine_config()
print("SAME TWICE")
EngineArgs(model=MODEL, served_model_name="second", max_model_len=256).create_engine_config()
"""
    done = simulated.script(script)
    assert "SAME TWICE" in done.stdout
    line = last_line(done)
    assert (
        "this process already runs an engine with another plan: the first has on-engine, this one on-engine, everywhere"
        in line
    )


def test_a_broken_file_stops_the_start_and_nothing_else(simulated: Session):
    """Help, imports and argument parsing go on; the start fails with file and line."""
    simulated.plan("[defaults\n")
    script = """
import vllm
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs(model=MODEL, max_model_len=256)
print("STILL HERE")
args.create_engine_config()
"""
    done = simulated.script(script)
    assert "STILL HERE" in done.stdout
    assert f"{simulated.config}:1: is not valid TOML" in last_line(done)


def test_what_would_leave_the_plan_unproven_refuses_it(simulated: Session):
    """A vLLM that lacks a place of ours, and the Rust front end: nothing planned may be absent in silence."""
    script = """
from vllm.v1 import utils
BREAK
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=MODEL, max_model_len=256).create_engine_config()
"""
    line = last_line(simulated.script(script.replace("BREAK", "del utils.APIServerProcessManager.shutdown")))
    assert "lacks a place that vllm-graft needs" in line
    assert "APIServerProcessManager" in line
    assert "Next: install vLLM >=0.26.0,<0.33 or a newer vllm-graft, or set GRAFT_DISABLE=1" in line
    simulated.env["VLLM_USE_RUST_FRONTEND"] = "1"
    line = last_line(simulated.script(script.replace("BREAK", "")))
    assert "VLLM_USE_RUST_FRONTEND: with the Rust front end nothing can be proven active" in line
    assert "Next: unset VLLM_USE_RUST_FRONTEND" in line
