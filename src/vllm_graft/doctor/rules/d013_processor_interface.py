"""D013: logits processors that the model runner of this vLLM does not take, or that make it take the other runner."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.doctor import engine
from vllm_graft.doctor.facts import Facts
from vllm_graft.doctor.packages import Entry
from vllm_graft.findings import Finding, Level

CODE = "D013"
TITLE = "A logits processor that does not fit the model runner"

# The V2 runner takes custom processors, of an interface of its own, since 0.31: https://github.com/vllm-project/vllm/pull/56497
_BOTH = "derive the class from both interfaces"


def check(facts: Facts) -> Iterator[Finding]:
    """Whoever installs a package with a logits processor gets this, whether they use it or not."""
    if facts.vllm is None:
        return
    processors: list[Entry | str] = [*facts.in_group(engine.PROCESSORS), *engine.logits_processors(facts)]
    for what in processors:
        if engine.before(facts, 0, 31):
            yield from _before_0_31(facts, what)
        else:
            yield from _since_0_31(facts, what)


def _before_0_31(facts: Facts, what: Entry | str) -> Iterator[Finding]:
    # Of a base that this release does not have, only the name in the import is known: no is as good as unknown.
    is_v1, is_v2 = (facts.reading.is_a(what, each) == "yes" for each in (engine.V1_PROCESSOR, engine.V2_PROCESSOR))
    if is_v2 and not is_v1:
        yield _finding(
            what,
            _level(facts),
            f"it is of the V2 interface, which vLLM {facts.vllm} does not have",
            f"{_BOTH}, or take vLLM 0.31 or later",
        )
    demand = engine.demands_v2(facts)
    if demand:
        yield _finding(
            what,
            "error",
            f"{demand} asks for the V2 runner, which refuses to start with custom logits processors on vLLM "
            f"{facts.vllm}" + (": an installed one is enough" if isinstance(what, Entry) else ""),
            _without(what) if "=" not in demand else f"unset VLLM_USE_V2_MODEL_RUNNER, or {_without(what)}",
        )
    elif engine.has_triton(facts) and engine.number(facts, "VLLM_USE_V2_MODEL_RUNNER") is None:
        installed = isinstance(what, Entry)
        yield _finding(
            what,
            "warning" if installed else "info",
            f"with it, vLLM {facts.vllm} runs every model on the V1 runner"
            + (", because it is installed and whether or not a request uses it" if installed else ""),
            _without(what) if installed else "",
        )


def _since_0_31(facts: Facts, what: Entry | str) -> Iterator[Finding]:
    if engine.generates(facts) is False:
        return
    v1, v2 = (facts.reading.is_a(what, each) for each in (engine.V1_PROCESSOR, engine.V2_PROCESSOR))
    if engine.runner(facts) == "V2" and v2 == "no":
        kind = "of the V1 interface" if v1 == "yes" else "no logits processor of the V2 interface"
        yield _finding(
            what,
            _level(facts),
            f"it is {kind}, and the V2 runner of vLLM {facts.vllm} refuses to start with it (ValueError)"
            + (", in every engine, because it is installed" if isinstance(what, Entry) else ""),
            f"{_BOTH}, set VLLM_USE_V2_MODEL_RUNNER=0, or {_without(what)}",
        )
    # An installed one may be any object that behaves like a V1 processor; only those that are named are compared.
    unfit = v1 == "no" and (v2 == "yes" or isinstance(what, str))
    if engine.runner(facts) == "V1" and unfit and engine.speculative_method(facts) is None:
        kind = "of the V2 interface only" if v2 == "yes" else "no logits processor of the V1 interface"
        yield _finding(
            what,
            _level(facts),
            f"it is {kind}, and this engine takes the V1 runner, which cannot use it and stops at start",
            f"{_BOTH}, or {_without(what)}",
        )


def _level(facts: Facts) -> Level:
    """An error where the runner is known, and that the model has logits processors: vLLM refuses with a clear word."""
    return "error" if engine.generates(facts) and engine.is_sure(facts) else "warning"


def _finding(what: Entry | str, level: Level, text: str, fix: str) -> Finding:
    if isinstance(what, Entry):
        return Finding(CODE, level, f"logits processor {what.name!r}", text, f"{what.package}: {what.value}", fix)
    return Finding(CODE, level, f"logits processor {what}", text, "--logits-processors", fix)


def _without(what: Entry | str) -> str:
    return f"uninstall {what.package}" if isinstance(what, Entry) else "take it out of --logits-processors"
