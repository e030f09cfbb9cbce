# ruff: noqa
import importlib
import sys

import vllm.v1.core.kv_cache_manager
import vllm.v1.sample.sampler as sampler
import vllm_ascend.worker as other
from vllm.v1.engine.core import EngineCore

from .bodies import fresh
from .compat import Request

_original_step = EngineCore.step


def step(self):
    return _original_step(self)


EngineCore.step = step
EngineCore.shutdown, EngineCore.limit = fresh, 3
first = EngineCore.add = fresh
EngineCore.note: str = "x"
sampler.Sampler.forward = lambda self, logits: logits
sampler.random_sample = fresh
vllm.v1.core.kv_cache_manager.KVCacheManager.free = fresh
Request.is_finished = fresh
other.Worker.step = fresh
del EngineCore.abort

manager = vllm.v1.core.kv_cache_manager
Target = manager.KVCacheManager
Target.usage = property(fresh)
Target.__dict__["reset"] = fresh
vars(sampler)["greedy_sample"] = fresh
Target.allocate_slots.__code__ = fresh.__code__


class FastSampler(sampler.Sampler):
    def sample(self, logits):
        return super().sample(logits, fast=True)


sampler.Sampler = FastSampler
sys.modules["vllm.v1.old"] = sampler
importlib.import_module("vllm.v1.outputs").ModelRunnerOutput.merge = fresh


def late(EngineCore):
    EngineCore.not_vllm = fresh
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, "sleep"):
        WorkerBase.sleep = fresh
