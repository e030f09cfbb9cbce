"""The table of extension points: every place where vLLM lets itself be extended, one row each.

A row has the contract, when vLLM calls it, its budget, its key in the configuration and the processes it runs in. The
rest of the package reads all of that here. Classes are named by strings, so that reading the table imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

Role = Literal["frontend", "engine", "worker", "registry"]

ROLES: Final[tuple[Role, ...]] = ("frontend", "engine", "worker", "registry")
"""The parts a process can play: the front end (API server, or the program that holds ``LLM``), engine core, a worker,
and the subprocess in which vLLM inspects a model class. One process may play several."""

PatchState = Literal["applied", "armed", "refused", "late"]
"""The state of a patch in one process, in an engine's report as in the ledger's records. applied: on its target; armed:
waits for its target's module to be imported; refused: not on its target, for the reason given; late: on its target,
which was running when the patch came."""

RELEASES: Final = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""The vLLM releases that bindings are written for."""

PATCHES_VARIABLE: Final = "VLLM_CUSTOM_PATCHES"
"""The environment variable with the names of patches, separated by commas; ``*`` stands for all."""


def custom_patches(environ: Mapping[str, str] | None = None) -> list[str] | None:
    """Return the names in ``VLLM_CUSTOM_PATCHES`` without blanks around them; None if it is unset."""
    text = (os.environ if environ is None else environ).get(PATCHES_VARIABLE)
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One extension point of vLLM.

    name:       the one word for it, used in every table and message
    contracts:  what an author implements, as ``module:Class``; several if there are several styles, none if the
                point is not bound yet or is vllm-graft's own
    called:     when vLLM calls it
    inputs:     what the author's code is given
    outputs:    what it returns
    budget_us:  microseconds one call may cost, ours alone; None if a budget has no meaning
    budget:     the budget in words
    key:        the key of ``graft.toml`` that names items of this point; empty if none does
    is_list:    whether the key holds a list of names
    registered: how it reaches vLLM
    roles:      the processes it runs in
    bound:      the releases this version of vllm-graft binds it on; empty: not bound yet
    """

    name: str
    contracts: tuple[str, ...] = ()
    called: str
    inputs: str
    outputs: str
    budget_us: float | None = None
    budget: str
    key: str = ""
    is_list: bool = False
    registered: str
    roles: tuple[Role, ...]
    bound: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the row with stable lower-case keys, for ``--json``."""
        # ``many`` is the key that readers of the JSON know.
        return {"many" if name == "is_list" else name: value for name, value in asdict(self).items()}


POINTS: Final[tuple[Point, ...]] = (
    Point(
        name="patch",
        contracts=("vllm_graft.patching:VLLMPatch",),
        called="wherever vLLM calls the patched method",
        inputs="the method's own arguments",
        outputs="the method's own result",
        budget="0: a plain function stays a plain function",
        key="patches",
        is_list=True,
        registered="methods set on the target in every process the patch declares",
        roles=ROLES,
        bound=RELEASES,
    ),
    Point(
        name="sampler",
        contracts=(
            "vllm_graft.contracts:SamplingStrategy",
            "vllm_graft.contracts:Truncation",
            "vllm_graft.contracts:Sampler",
        ),
        called="once per step, before a token is picked",
        inputs="logits of the batch, the rows that asked for it",
        outputs="the logits, changed in place, or the tokens of the rows",
        budget_us=500.0,
        budget="0.5 ms per step",
        key="samplers",
        is_list=True,
        registered="one logits processor added to the engine's arguments",
        roles=("worker",),
        bound=RELEASES,
    ),
    Point(
        name="scheduler",
        contracts=("vllm_graft.contracts:AdmissionQueue", "vllm_graft.contracts:SchedulingPolicy"),
        called="when a request arrives and when the scheduler admits one, or before each step",
        inputs="the waiting requests, or all requests and the state of the KV cache",
        outputs="which of them goes next, or which start and which are preempted",
        budget_us=1000.0,
        budget="1.0 ms per iteration",
        key="scheduler",
        registered="the engine's scheduler class",
        roles=("engine",),
        bound=RELEASES,
    ),
    Point(
        name="attention",
        contracts=("vllm_graft.contracts:KVPolicy", "vllm_graft.contracts:AttentionKernel"),
        called="for each layer at the start, or in every attention layer of every step",
        inputs="a layer or a request's blocks; query, key, value, KV cache, batch",
        outputs="a window or the blocks to free; the attention output",
        budget_us=100.0,
        budget="0.1 ms per layer, or 1.25 x bytes / bandwidth + 10 us if that is more",
        key="attention",
        registered="the backend and the KV-cache spec of each attention layer",
        roles=("engine", "worker"),
        bound=RELEASES,
    ),
    Point(
        name="expert-balancer",
        contracts=("vllm_graft.contracts:ExpertBalancer",),
        called="when vLLM's EPLB rearranges the experts of a model",
        inputs="load of each expert, present placement, groups, nodes, ranks",
        outputs="the expert in each slot of each layer",
        budget_us=2_000_000.0,
        budget="2 s per rearrangement",
        key="expert_balancer",
        registered="the policy of vLLM's EplbState",
        roles=("worker",),
        bound=RELEASES,
    ),
    Point(
        name="model",
        contracts=("vllm_graft.contracts:ModelPlugin",),
        called="when the model is loaded, then in every step",
        inputs="the engine's configuration, weights",
        outputs="a model class",
        budget="replaces the model",
        key="models",
        is_list=True,
        registered="vLLM's model registry",
        roles=ROLES,
        bound=RELEASES,
    ),
    Point(
        name="router",
        contracts=("vllm_graft.contracts:MoeRouter",),
        called="in every mixture-of-experts layer of every step",
        inputs="hidden states and the gate's logits",
        outputs="the experts of each token, and their weights",
        budget_us=100.0,
        budget="0.1 ms per layer",
        key="router",
        registered="the router of each mixture-of-experts layer",
        roles=("worker",),
        bound=RELEASES,
    ),
    Point(
        name="platform",
        contracts=("vllm.platforms.interface:Platform",),
        called="while vLLM is being imported",
        inputs="nothing",
        outputs="a platform class",
        budget="none",
        registered="the entry point graft of vllm.platform_plugins; asked for by GRAFT_SIMULATE",
        roles=("frontend", "engine", "worker", "registry"),
        bound=RELEASES,
    ),
    Point(
        name="lora-resolver",
        called="when a request names an adapter that is not loaded",
        inputs="base model and adapter name",
        outputs="an adapter, or None",
        budget="off the event loop",
        key="lora_resolvers",
        is_list=True,
        registered="vLLM's resolver registry",
        roles=("frontend",),
    ),
    Point(
        name="io-processor",
        called="for each request of a pooling model",
        inputs="the request's data; the model's outputs",
        outputs="prompts; the response",
        budget="never blocks the event loop",
        key="io_processor",
        registered="the engine's IO processor",
        roles=("frontend",),
    ),
    Point(
        name="stats",
        contracts=("vllm_graft.contracts:StatSink",),
        called="for each batch of outputs, in the front end",
        inputs="finished requests, and what the batch produced",
        outputs="nothing",
        budget_us=50.0,
        budget="50 us per batch",
        key="stats",
        is_list=True,
        registered="a stat logger given to the engine client",
        roles=("frontend",),
        bound=RELEASES,
    ),
    Point(
        name="endpoint",
        called="GET /graft/status, GET /graft/samplers",
        inputs="an HTTP request, behind the server's API key",
        outputs="the records of every process; the samplers and their keys",
        budget="none",
        registered="with any plan, unless endpoint = false",
        roles=("frontend",),
        bound=RELEASES,
    ),
)
"""Every extension point, in the order tables show them."""

_BY_NAME: Final = {point.name: point for point in POINTS}
_BY_KEY: Final = {point.key: point for point in POINTS if point.key}


def point(name: str) -> Point:
    """Return the row of that name; raise KeyError if there is none."""
    return _BY_NAME[name]


def keys() -> dict[str, Point]:
    """Return the configuration's keys that name items, each with its point."""
    return dict(_BY_KEY)
