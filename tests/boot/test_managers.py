"""``VLLM_CUSTOM_PATCHES`` with patches that general plugins register themselves, as the plugin guides have it."""

import json

import pytest

from vllm_graft.testing import Session

PATCH = """
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_graft import PatchManager, VLLMPatch, min_vllm_version


@min_vllm_version("0.9.1")
class PrioritySchedulerPatch(VLLMPatch[Scheduler]):
    def schedule_with_priority(self):
        return self.schedule()

    def schedule(self, *args, **kwargs):
        return self._original_schedule(*args, **kwargs)


manager = PatchManager()


def register_patches():
    manager.register("PriorityScheduler", PrioritySchedulerPatch)
    manager.apply_from_env()
"""

OWN_MANAGER = """
import os


class PriorityPatch:
    @classmethod
    def apply(cls):
        from vllm.v1.core.sched.scheduler import Scheduler

        Scheduler.schedule_with_priority = lambda self: self.schedule()


class BrokenPatch:
    @classmethod
    def apply(cls):
        raise RuntimeError("no such target")


class PatchManager:
    def __init__(self):
        self.available_patches = {}
        self.applied_patches = []

    def apply_from_env(self):
        for name in os.environ.get("VLLM_CUSTOM_PATCHES", "").split(","):
            try:
                self.available_patches[name].apply()
                self.applied_patches.append(name)
            except Exception as error:
                print("swallowed", error)


manager = PatchManager()


def register_patches():
    manager.available_patches.update(TheirPriority=PriorityPatch, TheirBroken=BrokenPatch)
    manager.apply_from_env()
"""

START = """
import json
from vllm import LLM, SamplingParams
llm = LLM(MODEL, max_model_len=256, num_gpu_blocks_override=64)
llm.generate("hi", SamplingParams(max_tokens=3, ignore_eos=True))
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_graft.ledger import runs
items = [item for run in runs() for row in run.rows() for item in row["items"]]
print("FACTS", json.dumps([hasattr(Scheduler, "schedule_with_priority"), items]))
"""


def prepare(session: Session) -> Session:
    """Both packages, neither of which offers anything under our group."""
    session.simulate("instant", "virtual")
    plugins = "vllm.general_plugins"
    session.package(
        "seed-patches", {plugins: {"custom_patches": "seed_manager:register_patches"}}, {"seed_manager": PATCH}
    )
    session.package(
        "their-patches", {plugins: {"theirs": "their_manager:register_patches"}}, {"their_manager": OWN_MANAGER}
    )
    return session


def facts(session: Session, names: str) -> tuple[bool, list[dict[str, object]], str]:
    """What a real ``LLM`` started with these names has, and what it logged."""
    session.env["VLLM_CUSTOM_PATCHES"] = names
    done = session.script(START)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))
    patched, items = json.loads(line.removeprefix("FACTS"))
    return patched, items, done.stdout + done.stderr


@pytest.mark.engine
def test_the_guides_own_flow(graft: Session):
    """Registered with our manager and named in the variable: active, called, recorded; the rest is left alone."""
    patched, items, log = facts(prepare(graft), "PriorityScheduler,TheirPriority")
    assert patched
    (item,) = items
    assert (item["name"], item["state"]) == ("PriorityScheduler", "applied")
    assert item["calls"] >= 3
    assert log.count("P007 info: patch TheirPriority: belongs to theirs of their-patches (their_manager.manager)") == 1


@pytest.mark.engine
def test_a_manager_that_is_not_ours(graft: Session):
    """Its package works as it did before vllm-graft was installed; what it swallowed is said."""
    patched, items, log = facts(prepare(graft), "TheirPriority,TheirBroken")
    assert patched
    assert items == []
    assert log.count("P007 info: patch TheirPriority: belongs to theirs of their-patches") == 1
    assert (
        "P008 warning: patch TheirBroken: is registered by theirs of their-patches (their_manager.manager), which has"
        in log
    )


@pytest.mark.engine
def test_a_name_that_nobody_registers(graft: Session):
    """Stops the start, as ever."""
    prepare(graft)
    graft.env["VLLM_CUSTOM_PATCHES"] = "PriorityScheduler,Nobody"
    done = graft.script(START)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "VLLM_CUSTOM_PATCHES: there is no item 'Nobody'" in last
    assert "no general plugin registers it" in last
