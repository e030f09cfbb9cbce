"""D013: logits processors that the model runner of this vLLM does not take, or that make it take the other runner."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import Environment
from vllm_graft.doctor.server import ProcessorSetting
from vllm_graft.findings import Finding, Level

CODE = "D013"
TITLE = "A logits processor that does not fit the model runner"

# The V2 runner takes custom processors, of an interface of its own, since 0.31: https://github.com/vllm-project/vllm/pull/56497
_BOTH = "derive the class from both interfaces"


def check(env: Environment) -> Iterator[Finding]:
    """Compare each processor, used or not, with the model runner that this engine would choose."""
    if env.vllm is None:
        return
    for processor in server.processors(env):
        found = _before_0_31(env, processor) if server.before(env, 0, 31) else _since_0_31(env, processor)
        yield from (processor.finding(CODE, level, what, fix) for level, what, fix in found)


def _before_0_31(env: Environment, processor: ProcessorSetting) -> Iterator[tuple[Level, str, str]]:
    # Of a base that this release does not have, only the name in the import is known: no is as good as unknown.
    bases = (server.V1_PROCESSOR, server.V2_PROCESSOR)
    is_v1, is_v2 = (env.classes.is_a(processor.target, each) == "yes" for each in bases)
    if is_v2 and not is_v1:
        what = f"it is of the V2 interface, which vLLM {env.vllm} does not have"
        yield server.processor_level(env), what, f"{_BOTH}, or take vLLM 0.31 or later"
    demand = server.demands_v2(env)
    if demand:
        refuses = f"refuses to start with custom logits processors on vLLM {env.vllm}"
        what = f"{demand} asks for the V2 runner, which {refuses}"
        what += ": an installed one is enough" if processor.is_installed else ""
        unset = "unset VLLM_USE_V2_MODEL_RUNNER, or " if "=" in demand else ""
        yield "error", what, f"{unset}{processor.removal}"
    elif server.vllm_has_triton(env) and server.number(env, "VLLM_USE_V2_MODEL_RUNNER") is None:
        what = f"with it, vLLM {env.vllm} runs every model on the V1 runner"
        if processor.is_installed:
            what += ", because it is installed and whether or not a request uses it"
            yield "warning", what, processor.removal
        else:
            yield "info", what, ""


def _since_0_31(env: Environment, processor: ProcessorSetting) -> Iterator[tuple[Level, str, str]]:
    if server.generates(env) is False:
        return
    v1, v2 = (env.classes.is_a(processor.target, each) for each in (server.V1_PROCESSOR, server.V2_PROCESSOR))
    if server.runner(env) == "V2" and v2 == "no":
        kind = "of the V1 interface" if v1 == "yes" else "no logits processor of the V2 interface"
        what = f"it is {kind}, and the V2 runner of vLLM {env.vllm} refuses to start with it (ValueError)"
        what += ", in every engine, because it is installed" if processor.is_installed else ""
        fix = f"{_BOTH}, set VLLM_USE_V2_MODEL_RUNNER=0, or {processor.removal}"
        yield server.processor_level(env), what, fix
    # An installed one may be any object that behaves like a V1 processor; only those that are named are compared.
    unfit = v1 == "no" and (v2 == "yes" or not processor.is_installed)
    if server.runner(env) == "V1" and unfit and server.speculative_method(env) is None:
        kind = "of the V2 interface only" if v2 == "yes" else "no logits processor of the V1 interface"
        what = f"it is {kind}, and this engine takes the V1 runner, which cannot use it and stops at start"
        yield server.processor_level(env), what, f"{_BOTH}, or {processor.removal}"
