"""D016: schedulers that cannot run ahead."""

import pytest

MODULE = """
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface

class Plain(Scheduler): ...
class Ahead(AsyncScheduler): ...
class Other(SchedulerInterface): ...
class Dark(make(Scheduler)): ...
"""


@pytest.fixture
def told(site, found_on):
    site.package("plug", {}, {"plug": MODULE})

    def found(name, *more, vllm="0.32.0"):
        site.arguments = ["--scheduler-cls", f"plug.{name}", *more]
        return found_on("D016", vllm)

    return found


@pytest.mark.parametrize("vllm", ["0.26.0", "0.32.0"])
def test_a_class_derived_from_scheduler_is_a_warning(told, vllm):
    (finding,) = told("Plain", vllm=vllm)
    assert (finding.level, finding.subject) == ("warning", "scheduler plug.Plain")
    assert "#43724" in finding.what
    assert "AsyncScheduler" in finding.fix


def test_others_are_fine_or_not_known(told):
    assert [told(name) for name in ("Ahead", "Other", "Dark", "Missing")] == [[], [], [], []]


@pytest.mark.parametrize(
    "more",
    [
        ("--no-async-scheduling",),
        ("--runner", "pooling"),
        ("--speculative-config", '{"method": "ngram"}'),
    ],
)
def test_without_asynchronous_scheduling_nothing_is_lost(told, more):
    assert told("Plain", *more) == []


def test_cpus_schedule_synchronously_and_simulated_accelerators_do_not(told, site, build_for_cpu):
    build_for_cpu()
    assert told("Plain") == []
    site.environ["GRAFT_SIMULATE"] = "H100"
    assert len(told("Plain")) == 1


def test_pipelines_are_synchronous_on_the_v1_runner_only(told, site):
    assert len(told("Plain", "--pipeline-parallel-size", "2")) == 1
    site.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    assert told("Plain", "--pipeline-parallel-size", "2") == []
