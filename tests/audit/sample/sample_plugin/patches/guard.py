# ruff: noqa
from vllm.v1.worker.gpu_worker import Worker

from vllm_graft.patching import VLLMPatch, add, replace, wrap


class Guard(
    VLLMPatch["vllm.v1.metrics.loggers:StatLoggerManager"],
    name="guard",
    vllm=">=0.26",
    why="loggers may raise",
    remove_when="they are caught",
):
    """Catches them."""

    __module__ = "elsewhere"

    @wrap
    def record(self, call, *args):
        return call(*args, safe=True)

    @replace
    def log(self):
        return None

    @add
    def forget(self):
        return None

    def close(self):
        return self._original_close()


class Old(ArcticPatch[Worker]):
    _orig_load_model = Worker.load_model

    def load_model(self):
        return self._orig_load_model()

    def sleep(self):
        return None
