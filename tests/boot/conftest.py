"""What the boot tests share: a package with patches for each process, and a plan that names them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft.testing import Session

PATCHES = """
import multiprocessing
import os

from vllm_graft import VLLMPatch, replace, wrap

if os.environ.get("BREAK_IN") and multiprocessing.current_process().name.startswith(os.environ["BREAK_IN"]):
    raise ImportError("libfoo.so.1 is not on this machine")

class OnEngine(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="on-engine", vllm=">=0.26",
               processes={"engine"}):
    @wrap
    def schedule(self, *args, **kwargs):
        return self._original_schedule(*args, **kwargs)

class OnWorker(VLLMPatch["vllm.v1.worker.worker_base:WorkerWrapperBase"], name="on-worker", vllm=">=0.26",
               processes={"worker"}):
    @wrap
    def execute_model(self, *args, **kwargs):
        return self._original_execute_model(*args, **kwargs)
    @wrap
    def init_device(self, *args, **kwargs):
        return self._original_init_device(*args, **kwargs)

class Everywhere(VLLMPatch["vllm.sampling_params:SamplingParams"], name="everywhere", vllm=">=0.26"):
    def graft_everywhere(self):
        return "everywhere"

class Late(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="too-late", processes={"engine"}):
    @wrap
    def __init__(self, call, *args, **kwargs):
        call(*args, **kwargs)

class WrongMethod(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="wrong-method", processes={"engine"}):
    @replace
    def shedule(self):
        return None

class OfLarge(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="of-large", models="*70B*",
              processes={"engine"}):
    @wrap
    def schedule(self, *args, **kwargs):
        return self._original_schedule(*args, **kwargs)

class Extension:
    def users_own(self):
        return "users own"

    def compile_key(self):
        from vllm import envs

        return envs.compile_factors()["GRAFT_PATCHSET"]
"""

ENTRIES = {
    "on-engine": "boot_patches:OnEngine",
    "on-worker": "boot_patches:OnWorker",
    "everywhere": "boot_patches:Everywhere",
    "too-late": "boot_patches:Late",
    "wrong-method": "boot_patches:WrongMethod",
    "of-large": "boot_patches:OfLarge",
}

PLAN = '[defaults]\npatches = ["on-engine", "on-worker", "everywhere", "stat-logger-guard"]\nstats = ["request-log"]\n'


def prepare(session: Session) -> Session:
    """Lay the package out and write the plan."""
    session.package("boot-patches", {"vllm_graft.plugins": ENTRIES}, {"boot_patches": PATCHES})
    session.plan(PLAN)
    return session


@pytest.fixture
def planned(graft: Session) -> Session:
    """A session with a plan that has something for every process."""
    return prepare(graft)


@pytest.fixture
def simulated(planned: Session) -> Session:
    """The same, on the simulated accelerator."""
    planned.simulate()
    return planned


@pytest.fixture(scope="module")
def planned_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """The plan, shared by the tests of one module."""
    folder: Path = tmp_path_factory.mktemp("planned")
    session = prepare(Session(folder))
    yield session
    session.close()
