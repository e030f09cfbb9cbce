"""D013: logits processors that the model runner of this vLLM does not take, or that make it take the other runner."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import server
from vllm_graft.doctor.environment import EntryPoint, Environment
from vllm_graft.findings import Finding, Level

CODE = "D013"
TITLE = "A logits processor that does not fit the model runner"

# The V2 runner takes custom processors, of an interface of its own, since 0.31: https://github.com/vllm-project/vllm/pull/56497
_BOTH = "derive the class from both interfaces"


def check(env: Environment) -> Iterator[Finding]:
    """Whoever installs a package with a logits processor gets this, whether they use it or not."""
    if env.vllm is None:
        return
    processors: list[EntryPoint | str] = [*env.in_group(server.PROCESSORS), *server.logits_processors(env)]
    for what in processors:
        if server.before(env, 0, 31):
            yield from _before_0_31(env, what)
        else:
            yield from _since_0_31(env, what)


def _before_0_31(env: Environment, what: EntryPoint | str) -> Iterator[Finding]:
    # Of a base that this release does not have, only the name in the import is known: no is as good as unknown.
    is_v1, is_v2 = (env.classes.is_a(what, each) == "yes" for each in (server.V1_PROCESSOR, server.V2_PROCESSOR))
    if is_v2 and not is_v1:
        yield _finding(
            what,
            _level(env),
            f"it is of the V2 interface, which vLLM {env.vllm} does not have",
            f"{_BOTH}, or take vLLM 0.31 or later",
        )
    demand = server.demands_v2(env)
    if demand:
        yield _finding(
            what,
            "error",
            f"{demand} asks for the V2 runner, which refuses to start with custom logits processors on vLLM "
            f"{env.vllm}" + (": an installed one is enough" if isinstance(what, EntryPoint) else ""),
            _without(what) if "=" not in demand else f"unset VLLM_USE_V2_MODEL_RUNNER, or {_without(what)}",
        )
    elif server.has_triton(env) and server.number(env, "VLLM_USE_V2_MODEL_RUNNER") is None:
        installed = isinstance(what, EntryPoint)
        yield _finding(
            what,
            "warning" if installed else "info",
            f"with it, vLLM {env.vllm} runs every model on the V1 runner"
            + (", because it is installed and whether or not a request uses it" if installed else ""),
            _without(what) if installed else "",
        )


def _since_0_31(env: Environment, what: EntryPoint | str) -> Iterator[Finding]:
    if server.generates(env) is False:
        return
    v1, v2 = (env.classes.is_a(what, each) for each in (server.V1_PROCESSOR, server.V2_PROCESSOR))
    if server.runner(env) == "V2" and v2 == "no":
        kind = "of the V1 interface" if v1 == "yes" else "no logits processor of the V2 interface"
        yield _finding(
            what,
            _level(env),
            f"it is {kind}, and the V2 runner of vLLM {env.vllm} refuses to start with it (ValueError)"
            + (", in every engine, because it is installed" if isinstance(what, EntryPoint) else ""),
            f"{_BOTH}, set VLLM_USE_V2_MODEL_RUNNER=0, or {_without(what)}",
        )
    # An installed one may be any object that behaves like a V1 processor; only those that are named are compared.
    unfit = v1 == "no" and (v2 == "yes" or isinstance(what, str))
    if server.runner(env) == "V1" and unfit and server.speculative_method(env) is None:
        kind = "of the V2 interface only" if v2 == "yes" else "no logits processor of the V1 interface"
        yield _finding(
            what,
            _level(env),
            f"it is {kind}, and this engine takes the V1 runner, which cannot use it and stops at start",
            f"{_BOTH}, or {_without(what)}",
        )


def _level(env: Environment) -> Level:
    """An error where the runner is known, and that the model has logits processors: vLLM refuses with a clear word."""
    return "error" if server.generates(env) and server.is_sure(env) else "warning"


def _finding(what: EntryPoint | str, level: Level, text: str, fix: str) -> Finding:
    if isinstance(what, EntryPoint):
        return Finding(CODE, level, f"logits processor {what.name!r}", text, what.origin, fix)
    return Finding(CODE, level, f"logits processor {what}", text, "--logits-processors", fix)


def _without(what: EntryPoint | str) -> str:
    return f"uninstall {what.package}" if isinstance(what, EntryPoint) else "take it out of --logits-processors"
