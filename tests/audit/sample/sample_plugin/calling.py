# ruff: noqa
from unittest import mock

import gorilla
import wrapt
from vllm.v1.engine.async_llm import AsyncLLM

from sample_plugin.bodies import fresh

NAMES = ("abort", "generate")

for name in NAMES:
    setattr(AsyncLLM, name, fresh)

for name, value in {"encode": fresh}.items():
    type.__setattr__(AsyncLLM, name, value)

delattr(AsyncLLM, "old")


def traced(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)


wrapt.wrap_function_wrapper("vllm.v1.engine.processor", "Processor.process_inputs", traced)


@wrapt.patch_function_wrapper("vllm.v1.engine.processor", "Processor.validate")
def validate(wrapped, instance, args, kwargs):
    return None


gorilla.apply(gorilla.Patch(AsyncLLM, "shutdown", fresh))


@gorilla.patch(AsyncLLM)
def check_health(self):
    return gorilla.get_original_attribute(AsyncLLM, "check_health")(self)


@mock.patch("vllm.v1.engine.utils.launch")
def test_one(launch, monkeypatch):
    monkeypatch.setattr(AsyncLLM, "reset", fresh)
    monkeypatch.setattr("vllm.v1.engine.utils.Manager.close", fresh)
    with mock.patch.object(AsyncLLM, "start_profile"):
        pass
