"""A package that uses vLLM in every way, and exactly what is found in it: nothing missed, nothing false."""

from pathlib import Path

import pytest

from vllm_graft.audit.uses import body_dependencies, read

SAMPLE = Path(__file__).parents[1] / "sample" / "sample_plugin"

EXPECTED = """
assigning.py:5 import vllm.v1.core.kv_cache_manager
assigning.py:6 import vllm.v1.sample.sampler
assigning.py:8 import vllm.v1.engine.core:EngineCore
assigning.py:13 import vllm.v1.engine.core:EngineCore.step
assigning.py:17 call vllm.v1.engine.core:EngineCore.step (step)
assigning.py:20 wrap vllm.v1.engine.core:EngineCore.step
assigning.py:21 replace vllm.v1.engine.core:EngineCore.shutdown
assigning.py:21 replace vllm.v1.engine.core:EngineCore.limit
assigning.py:22 replace vllm.v1.engine.core:EngineCore.add
assigning.py:23 replace vllm.v1.engine.core:EngineCore.note
assigning.py:24 replace vllm.v1.sample.sampler:Sampler.forward
assigning.py:25 replace vllm.v1.sample.sampler:random_sample
assigning.py:26 replace vllm.v1.core.kv_cache_manager:KVCacheManager.free
assigning.py:27 replace guarded vllm.v1.request:Request.is_finished
assigning.py:27 replace guarded vllm.request:Request.is_finished
assigning.py:29 delete vllm.v1.engine.core:EngineCore.abort
assigning.py:32 import vllm.v1.core.kv_cache_manager:KVCacheManager
assigning.py:33 replace vllm.v1.core.kv_cache_manager:KVCacheManager.usage
assigning.py:34 replace vllm.v1.core.kv_cache_manager:KVCacheManager.reset
assigning.py:35 replace vllm.v1.sample.sampler:greedy_sample
assigning.py:36 replace vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots
assigning.py:39 subclass vllm.v1.sample.sampler:Sampler (FastSampler)
assigning.py:40 override vllm.v1.sample.sampler:Sampler.sample (FastSampler)
assigning.py:41 call vllm.v1.sample.sampler:Sampler.sample (FastSampler.sample)
assigning.py:44 replace vllm.v1.sample.sampler:Sampler
assigning.py:45 replace vllm.v1.old
assigning.py:46 replace vllm.v1.outputs:ModelRunnerOutput.merge
assigning.py:51 import vllm.v1.worker.worker_base:WorkerBase
assigning.py:54 replace guarded vllm.v1.worker.worker_base:WorkerBase.sleep (late)
calling.py:6 import vllm.v1.engine.async_llm:AsyncLLM
calling.py:13 replace vllm.v1.engine.async_llm:AsyncLLM.abort
calling.py:13 replace vllm.v1.engine.async_llm:AsyncLLM.generate
calling.py:16 replace vllm.v1.engine.async_llm:AsyncLLM.encode
calling.py:18 delete vllm.v1.engine.async_llm:AsyncLLM.old
calling.py:25 wrap vllm.v1.engine.processor:Processor.process_inputs
calling.py:28 replace vllm.v1.engine.processor:Processor.validate
calling.py:33 replace vllm.v1.engine.async_llm:AsyncLLM.shutdown
calling.py:36 wrap vllm.v1.engine.async_llm:AsyncLLM.check_health
calling.py:38 import vllm.v1.engine.async_llm:AsyncLLM.check_health
calling.py:38 call vllm.v1.engine.async_llm:AsyncLLM.check_health (check_health)
calling.py:41 replace vllm.v1.engine.utils:launch
calling.py:43 replace vllm.v1.engine.async_llm:AsyncLLM.reset (test_one)
calling.py:44 replace vllm.v1.engine.utils:Manager.close (test_one)
calling.py:45 replace vllm.v1.engine.async_llm:AsyncLLM.start_profile (test_one)
compat.py:12 import guarded vllm.v1.request:Request
compat.py:14 import guarded vllm.request:Request
compat.py:17 import guarded vllm.v1.core.sched.scheduler:Scheduler
compat.py:19 import guarded vllm.core.scheduler:Scheduler
compat.py:23 import vllm:LLM
compat.py:23 import vllm:envs.VLLM_USE_V1
compat.py:23 import guarded vllm:AsyncLLMEngine
deriving.py:2 import vllm.v1.core.sched.async_scheduler:AsyncScheduler
deriving.py:7 subclass vllm.v1.core.sched.async_scheduler:AsyncScheduler (Base)
deriving.py:10 override vllm.v1.core.sched.async_scheduler:AsyncScheduler.__init__ (Base)
deriving.py:11 call vllm.v1.core.sched.async_scheduler:AsyncScheduler.__init__ (Base.__init__)
deriving.py:18 subclass vllm.v1.core.sched.async_scheduler:AsyncScheduler (Leaf)
deriving.py:19 override vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule (Leaf)
deriving.py:23 override vllm.v1.core.sched.async_scheduler:AsyncScheduler.size (Leaf)
deriving.py:27 subclass guarded vllm.v1.core.sched.scheduler:Scheduler (Either)
deriving.py:27 subclass guarded vllm.core.scheduler:Scheduler (Either)
patches/guard.py:2 import vllm.v1.worker.gpu_worker:Worker
patches/guard.py:19 wrap vllm.v1.metrics.loggers:StatLoggerManager.record (guard)
patches/guard.py:23 replace vllm.v1.metrics.loggers:StatLoggerManager.log (guard)
patches/guard.py:27 add vllm.v1.metrics.loggers:StatLoggerManager.forget (guard)
patches/guard.py:30 wrap vllm.v1.metrics.loggers:StatLoggerManager.close (guard)
patches/guard.py:35 import vllm.v1.worker.gpu_worker:Worker.load_model
patches/guard.py:35 replace vllm.v1.worker.gpu_worker:Worker._orig_load_model (Old)
patches/guard.py:37 wrap vllm.v1.worker.gpu_worker:Worker.load_model (Old)
patches/guard.py:40 replace vllm.v1.worker.gpu_worker:Worker.sleep (Old)
"""


@pytest.fixture(scope="module")
def reading():
    return read(SAMPLE)


def shown(use):
    file = use.file.removeprefix("sample_plugin/")
    guarded = " guarded" if use.guarded else ""
    return f"{file}:{use.line} {use.way}{guarded} {use.name}" + (f" ({use.owner})" if use.owner else "")


def test_every_use_and_no_other(reading):
    """File, line, way, guard, name and owner of each."""
    assert [shown(use) for use in reading.uses] == EXPECTED.split("\n")[1:-1]
    assert (reading.package, reading.files, reading.unread) == ("sample_plugin", 8, ())


def test_bodies(reading):
    """Every change that is a function of the package has its body and text; a value and a class have no body."""
    without = {use.qualname for use in reading.uses if use.changes_vllm and use.way != "delete" and use.body is None}
    assert without == {
        "", "launch", "Sampler", "EngineCore.limit", "EngineCore.note", "AsyncLLM.start_profile",
        "Worker._orig_load_model",
    }  # fmt: skip
    assert all(use.source for use in reading.uses if use.body is not None)


def test_the_patch(reading):
    """What it says of itself, and what was reviewed of each of its hooks."""
    record, log, *_ = [use.patch for use in reading.uses if use.owner == "guard"]
    assert (record.name, record.vllm, record.remove_when) == ("guard", ">=0.26", "they are caught")
    assert record.reviewed == {"0.32.0": "s:1f3a5b7c9d0e2f40 b:0c2e4a6f8b1d3579"}
    assert log.reviewed == {}


def test_what_it_leans_on(reading):
    """Attributes of the object that are vLLM's, and keywords of the original."""
    leaning = {use.qualname: body_dependencies(use) for use in reading.uses if use.body is not None}
    assert set(leaning["AsyncScheduler.schedule"].attributes) == {"waiting"}
    assert set(leaning["Sampler.sample"].keywords) == {"fast"}
    assert set(leaning["StatLoggerManager.record"].keywords) == {"safe"}
    assert set(leaning["EngineCore.shutdown"].attributes) == {"things"}
