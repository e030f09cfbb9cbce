"""The attention layers of this process: each asks the planned policy, and is changed, left as it is, or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from vllm_graft.bindings.attention.backends import SERVED, compacting_backend
from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.kernel import kernel_class
from vllm_graft.bindings.attention.token_tables import read_tokens
from vllm_graft.bindings.instantiate import failure_reason, guard_method, instantiate
from vllm_graft.contracts import KVPolicy, LayerView, RequestBlocks, Window
from vllm_graft.errors import StartError
from vllm_graft.ledger import Meter, current
from vllm_graft.plan import Plan, PlanItem, carried_plan, carried_run
from vllm_graft.points import point

if TYPE_CHECKING:
    from vllm_graft.bindings.attention.eviction import EvictingManager
    from vllm_graft.bindings.attention.scoring import BlockScorer

_QUANTIZED: Final = ("fp8", "nvfp4", "int")
"""How the types of quantized KV caches begin."""


Answer = Window | Literal["evict"] | None
"""What a layer has from the policy: a window, blocks that are evicted one by one, or nothing."""


class PlannedLayers:
    """The planned policy of this process, and the layers that have a window from it, or whose blocks it evicts."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._policy: KVPolicy | None = None
        self.windows: dict[str, Answer] = {}
        """The policy's answer for each layer, by the layer's name."""
        self.evicting: list[EvictingManager] = []
        """In engine core: the managers that ask the policy which blocks to evict."""
        self.report_blocks: Callable[[], None] = lambda: None
        """In engine core: report the blocks that are held and were freed."""
        self.scorer: BlockScorer | None = None
        """In a worker whose policy wants scores: what computes them."""
        self._refused = False
        self._config: Any = None

    @property
    def evicts(self) -> bool:
        """True if the policy evicts blocks of this worker's layers one by one."""
        return "evict" in self.windows.values()

    def adapt(self, layer: Any, spec: Any, config: Any) -> Any:
        """Return the KV-cache spec of a layer, after giving the layer the backend that goes with it."""
        view = layer_view(layer, spec, config)
        planned = self.adapt_spec(view, spec, config, lambda: _unserved(layer), layer)
        # vLLM asks for the spec more than once: when it sizes the KV cache, and when it makes it.
        if self.windows.get(view.name) is not None and not getattr(layer.attn_backend, "compacts", False):
            layer.attn_backend = compacting_backend(
                layer.attn_backend, self.prove_builder, self.note_step, self.table_meter
            )
            if view.window is not None:
                read_tokens(layer.impl)
        return planned

    def adapt_spec(
        self, view: LayerView, spec: Any, config: Any, unserved: Callable[[], str] = lambda: "", layer: Any = None
    ) -> Any:
        """Return the KV-cache spec of a layer that may exist as a view alone, as on the simulated accelerator.

        ``unserved`` is called for a layer that is to have a window, and says why it cannot. ``layer`` is the layer
        itself, if there is one.
        """
        item, policy = self._planned()
        if item is None or policy is None:
            return spec
        if config is not self._config:
            # Another engine of this process, as in a notebook: what was refused may be corrected.
            self._config, self.windows, self._refused, self.scorer = config, {}, False, None
        try:
            window: Answer = policy.window(view)
            if window is None and view.window is None and type(policy).evict is not KVPolicy.evict:
                window = "evict"
            planned = _planned_spec(spec, view, window, config, unserved) if window is not None else spec
            if window == "evict" and policy.wants_scores:
                self._watch(policy, view, layer, config)
        # SystemExit too, as for every other method of an item.
        except BaseException as error:
            self.windows.pop(view.name, None)
            self._refuse(item, view.name, failure_reason(error))
            return spec
        if view.name not in self.windows and not self._refused:
            self._note_answer(item, window)
        self.windows[view.name] = window
        return planned

    def _note_answer(self, item: PlanItem, window: Answer) -> None:
        """Record a layer's first answer: a window has yet to be proven, layers without one are as they should be."""
        if window is not None and not any(self.windows.values()):
            current().set_item(item.point, item.name, "armed", "no layer runs with its window yet")
        elif window is None and not self.windows:
            # A pipeline stage may have none of the layers that are meant.
            current().set_item(item.point, item.name, "applied")

    def _watch(self, policy: KVPolicy, view: LayerView, layer: Any, config: Any) -> None:
        """Have a layer score blocks if the policy chooses it; raise ValueError where blocks cannot be scored."""
        if layer is None:
            raise ValueError("its policy wants scores, and the simulated accelerator computes no attention")
        from vllm_graft.bindings.attention.scoring import BlockScorer, unscorable

        if reason := unscorable(config):
            raise ValueError(reason)
        every: object = policy.score_every
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"score_every is {every!r}, and must be at least one step")
        if self.scorer is None:
            self.scorer = BlockScorer(every)
        if policy.scores_layer(view):
            self.scorer.watch(view.name, layer)

    def note_step(self, metadata: Any) -> None:
        """Have the rows of a step remembered for its scoring."""
        if self.scorer is not None:
            self.scorer.note_step(metadata)

    def table_meter(self) -> Meter:
        """Return the meter of the block tables, which are compacted once for each step and group of layers."""
        item, _ = self._planned()
        assert item is not None
        return current().hook(item.name, "compact", point(item.point).budget_us)

    def prepare_scores(self, runner: Any, kv_cache_config: Any) -> None:
        """Make the buffers of the layers that score, once the number of blocks is known."""
        item, _ = self._planned()
        if item is None or self.scorer is None or self._refused:
            return
        if not self.scorer.layers:
            self._refuse(item, "scores_layer()", "it chose no layer of the model, so no block is ever scored")
            return
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.scorer.allocate(kv_cache_config.num_blocks, block_size, runner.vllm_config, runner.device)

    def score_step(self, runner: Any, sample: Callable[[], Any]) -> Any:
        """Score blocks after the forward pass of a step, and return its output with the scores that have arrived."""
        if self.scorer is None or self._refused:
            return sample()
        from vllm_graft.bindings.attention.scoring import step_requests

        self.scorer.score_step(step_requests(runner))
        return self.scorer.report(sample())

    def prove_groups(self, groups: Iterable[Any]) -> None:
        """Record the groups of layers with a window, where no metadata builder is ever made."""
        item, policy = self._planned()
        if item is None or policy is None or self._refused:
            return
        current().set_item(item.point, item.name, "applied")
        for group in groups:
            if any(self.windows.get(name) is not None for name in group.layer_names):
                self.prove_builder(group.layer_names)
        current().save()

    def prove_builder(self, names: Sequence[str]) -> None:
        """Record that a group of layers runs with compacted rows; called once its metadata builder is made."""
        item, _ = self._planned()
        # One layer's refusal stands, whatever the others have.
        if item is None or self._refused:
            return
        missing = [name for name in names if self.windows.get(name) is None]
        if missing:
            self._refuse(item, missing[0], f"vLLM put it into one group with {names[0]}, which has another window")
            return
        ledger = current()
        ledger.set_item(item.point, item.name, "applied")
        ledger.figure(item.name, "attention layers").set(sum(window is not None for window in self.windows.values()))

    def prove_managers(self, manager: Any) -> None:
        """Record in engine core that blocks are freed, or that no group of layers has a window."""
        item, policy = self._planned()
        if item is None or policy is None or self._refused:
            return
        groups = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        windows = [getattr(spec, "sliding_window", None) for spec in groups]
        self.evicting = _evicting_managers(manager)
        if not any(windows) and not self.evicting:
            self._refuse(item, "engine core", "no group of layers has a window, so no block is ever freed")
            return
        if self.evicting and len(groups) > 1:
            what = f"the model has {len(groups)} groups of layers, and blocks are evicted for all layers at once"
            self._refuse(item, "engine core", what)
            return
        decay: object = policy.score_decay
        if policy.wants_scores and not (isinstance(decay, int | float) and 0 <= decay < 1):
            self._refuse(item, "engine core", f"score_decay is {decay!r}, and must be from 0 to below 1")
            return
        current().set_item(item.point, item.name, "applied")
        current().save()
        for each in self.evicting:
            each.ask, each.decay = _guarded_evict(item, policy), policy.score_decay
        self.report_blocks = _block_reporter(manager, item.name, policy.wants_scores)

    def _planned(self) -> tuple[PlanItem | None, KVPolicy | None]:
        """Return the planned item and its instance, which is made on first use."""
        plan, run = carried_plan(), carried_run()
        planned = plan.of("attention") if plan is not None else ()
        if plan is None or not planned or (run is not None and planned[0].name in run.left_out):
            self._plan, self._policy, self.windows = None, None, {}
            return None, None
        item = planned[0]
        if kernel_class(item) is not None:
            # Its layers are those of PlannedKernel.
            return None, None
        if self._plan != plan:
            self._plan, self.windows, self._refused = plan, {}, False
            self._policy = instantiate(item, KVPolicy, plan, current())
            if self._policy is not None:
                # Made is not active: each layer has to show that first.
                current().set_item(item.point, item.name, "armed", "no layer has asked for its window yet")
        return item, self._policy

    def _refuse(self, item: PlanItem, subject: str, reason: str) -> None:
        """Record that a layer cannot have what is planned; stop the start unless the plan is lenient."""
        ledger = current()
        if not self._refused:
            ledger.set_item(item.point, item.name, "refused", f"{subject}: {reason}")
            ledger.save()
        self._refused = True
        if self._plan is None or self._plan.strict:
            raise StartError(
                f"attention {item.name!r} (from {item.origin}) cannot be used: {reason}",
                where=subject,
                fix=f"change [options.{item.name}], or take it out of the plan for this model",
            )


planned_layers: Final = PlannedLayers()
"""The layers of this process."""


def _evicting_managers(manager: Any) -> list[EvictingManager]:
    from vllm_graft.bindings.attention.eviction import evicting_managers

    return evicting_managers(manager)


def _guarded_evict(item: PlanItem, policy: KVPolicy) -> Callable[[RequestBlocks], Collection[int] | None]:
    """Return the policy's ``evict``, guarded: an answer that cannot be followed costs the policy, not the engine."""
    from vllm_graft.bindings.attention.eviction import validate

    def evict(request: RequestBlocks) -> list[int]:
        return validate(policy.evict(request), request)

    # Asked once for each block that a request fills, so seldom: the scheduler's budget, not that of a layer.
    return guard_method(item, "evict", evict, current(), budget_us=point("scheduler").budget_us)


def _block_reporter(manager: Any, name: str, scores: bool) -> Callable[[], None]:
    """Have the managers of engine core report the blocks that are held and were freed, in each step."""
    from vllm_graft.bindings.attention.eviction import EvictingManager
    from vllm_graft.bindings.attention.retention import SinkWindowManager

    ours = (SinkWindowManager, EvictingManager)
    managers = [each for each in manager.coordinator.single_type_managers if isinstance(each, ours)]
    if not managers:
        return lambda: None
    pool = manager.block_pool
    held, freed = current().figure(name, "KV blocks held"), current().figure(name, "KV blocks freed")
    scored = current().figure(name, "KV scorings") if scores else None

    def report() -> None:
        # The pool's own count, without the null block, which is never handed out.
        held.set(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        freed.set(sum(each.freed for each in managers))
        if scored is not None:
            scored.set(sum(each.scored for each in managers))

    managers[0].report = report
    return report


def layer_view(layer: Any, spec: Any, config: Any) -> LayerView:
    """Return what a policy sees of a layer."""
    digits = [part for part in layer.layer_name.split(".") if part.isdigit()]
    text = config.model_config.hf_text_config
    return LayerView(
        name=layer.layer_name,
        index=int(digits[0]) if digits else 0,
        layers=int(getattr(text, "num_hidden_layers", 0)),
        window=layer.sliding_window,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        block_size=spec.block_size,
        max_tokens=config.model_config.max_model_len,
    )


def _planned_spec(spec: Any, view: LayerView, window: Answer, config: Any, unserved: Callable[[], str]) -> Any:
    """Return the spec of a layer with this window; raise ValueError or TypeError for what cannot be served."""
    if window == "evict":
        if reason := unserved():
            raise ValueError(reason)
        if config.kv_transfer_config is not None:
            raise ValueError("a KV connector brings whole prefixes, and evicted blocks would be missing")
        from vllm_graft.bindings.attention.eviction import EvictingSpec

        return EvictingSpec.of(spec)
    if not isinstance(window, Window):
        raise TypeError(f"window() answered {window!r}, which is no Window")
    if reason := unserved():
        raise ValueError(reason)
    if view.window is not None:
        # The model was trained with it: narrower is another model, wider has no blocks to read.
        if window != Window(0, view.window):
            raise ValueError(
                f"the model gives this layer a window of {view.window} tokens, and the policy asks for {window}; only "
                f"Window(0, {view.window}) can be served"
            )
        return spec
    if config.kv_transfer_config is not None:
        raise ValueError("a KV connector brings the tokens of the window alone, and the first ones would be missing")
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        # vLLM then gives all layers one spec, and where they differ that of full attention.
        raise ValueError("vLLM's hybrid KV-cache manager is off, with which layers have no windows of their own")
    from vllm_graft.bindings.attention.retention import SinkWindowSpec

    return SinkWindowSpec.of(spec, WindowShape.fit(window.first, window.last, spec.block_size))


def _unserved(layer: Any) -> str:
    """Return why a layer cannot have a window; empty if it can."""
    name = layer.attn_backend.get_name()
    if type(layer).__name__ != "Attention":
        return f"it is a {type(layer).__name__}, and windows are for plain causal self-attention"
    if name not in SERVED:
        return f"vLLM chose the backend {name} for it, and windows are served on {', '.join(SERVED)}"
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        return "it has ALiBi, whose biases count the tokens between, and those are left out"
    return unserved_cache(str(layer.kv_cache_dtype))


def unserved_cache(dtype: str) -> str:
    """Return why a KV cache of this type cannot have a window; empty if it can."""
    return f"its KV cache is quantized ({dtype}), which is not served yet" if dtype.startswith(_QUANTIZED) else ""
