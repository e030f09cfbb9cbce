# ruff: noqa
from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

try:
    from vllm.v1.request import Request
except ImportError:
    from vllm.request import Request

if vllm.__version__ >= "0.30":
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    from vllm.core.scheduler import Scheduler


def asked(config: VllmConfig):
    return vllm.LLM, vllm.envs.VLLM_USE_V1, getattr(vllm, "AsyncLLMEngine", None)
