"""The attention layers of this process: each asks the planned policy, and is changed, left as it is, or refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from vllm_graft.bindings.attention.backends import SERVED, compacting_backend
from vllm_graft.bindings.attention.compaction import WindowShape
from vllm_graft.bindings.attention.freed_block_check import VARIABLE, FreedBlocks, checked, search_output, unchecked
from vllm_graft.bindings.attention.kernel import kernel_class
from vllm_graft.bindings.attention.request_windows import Ask, RowWindows, stamp_window
from vllm_graft.bindings.attention.request_windows import validate as validate_window
from vllm_graft.bindings.attention.token_tables import read_tokens
from vllm_graft.bindings.instantiate import failure_reason, guard_method, instantiate
from vllm_graft.contracts import KVPolicy, LayerView, RequestBlocks, Window
from vllm_graft.errors import StartError
from vllm_graft.ledger import Meter, current
from vllm_graft.plan import Plan, PlanItem, inherited_plan, inherited_run
from vllm_graft.points import point

if TYPE_CHECKING:
    from vllm_graft.bindings.attention.eviction import EvictingManager
    from vllm_graft.bindings.attention.retention import SinkWindowManager
    from vllm_graft.bindings.attention.scoring import BlockScorer

EVICTIONS: Final = "graft_evicted"
"""The attribute of a step's schedule with the evicted blocks of each request, which vLLM pickles to its workers."""

SCORES: Final = "graft_scores"
"""The attribute of a step's output with the scores of requests: one row per request, NaN where there is no block."""

_ASKING: Final = "graft_asking"
"""The attribute of vLLM's ``KVCacheManager`` with those of its managers that ask the policy."""

_WINDOWED: Final = "graft_windowed"
"""The attribute of vLLM's ``KVCacheManager`` with those of its managers that free what has left a window."""

_STAMPS: Final = "graft_stamps"
"""The attribute of vLLM's ``KVCacheManager`` with what asks for the window of a request, and with the policy's keys."""

_LOST_EVICTIONS: Final = (
    "its scheduler does not go through Scheduler.schedule, so no worker would learn what is evicted"
)

_PLAIN: Final = ("auto", "float32", "float16", "bfloat16", "half", "float")
"""The types of KV caches that are served: each release has other quantized ones."""


Answer = Window | Literal["evict"] | None
"""What a layer has from the policy: a window, blocks that are evicted one by one, or nothing."""


class PlannedLayers:
    """The planned policy of this process, and the layers that have a window from it, or whose blocks it evicts."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._policy: KVPolicy | None = None
        self.windows: dict[str, Answer] = {}
        """The policy's answer for each layer, by the layer's name."""
        self._answers: dict[LayerView, Answer] = {}
        """The policy's answer to each view of a layer, because vLLM asks for a layer's spec more than once."""
        self.report_blocks: Callable[[], None] = lambda: None
        """In engine core: report the blocks that are held and were freed."""
        self.scorer: BlockScorer | None = None
        """In a worker whose policy wants scores: what computes them."""
        self.score_every = 0
        """The steps between two scorings; 0 if none are wanted."""
        self.row_windows = RowWindows()
        """In a worker: the rows of a step whose requests have windows of their own."""
        self._refused = False
        self._config: Any = None

    def adapt(self, layer: Any, spec: Any, config: Any) -> Any:
        """Return the KV-cache spec of a layer, after giving the layer the backend that goes with it."""
        view = layer_view(layer, spec, config)
        planned = self.adapt_spec(view, spec, config, lambda: _unserved(layer, config), layer)
        # vLLM asks for the spec more than once: when it sizes the KV cache, and when it makes it.
        if self.windows.get(view.name) is not None and not getattr(layer.attn_backend, "compacts", False):
            layer.attn_backend = compacting_backend(
                layer.attn_backend, self.watch_builder, self.table_meter, self.row_windows
            )
            if view.window is not None:
                read_tokens(layer.impl)
            if checked() and not unchecked(config):
                search_output(layer)
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
            self._answers, self.score_every = {}, 0
            self.row_windows.possible = _narrows(policy)
        try:
            window = self._ask(policy, view)
            planned = _planned_spec(spec, view, window, config, unserved) if window is not None else spec
            if self.row_windows.possible and getattr(config.parallel_config, "use_ubatching", False):
                raise ValueError(
                    "requests may narrow its window, but with micro-batches a step's rows are not in order"
                )
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

    def _ask(self, policy: KVPolicy, view: LayerView) -> Answer:
        """Return the policy's answer for a layer, asked for once."""
        if view not in self._answers:
            window: Answer = policy.window(view)
            if window is None and view.window is None and _evicts(policy):
                window = "evict"
            self._answers[view] = window
        return self._answers[view]

    def _note_answer(self, item: PlanItem, window: Answer) -> None:
        """Record a layer's first answer: a window has yet to be proven, layers without one are as they should be."""
        if window is not None and not any(self.windows.values()):
            current().set_item(item.point, item.name, "armed", "no layer runs with its window yet")
        elif window is None and not self.windows:
            # A pipeline stage may have none of the layers that are meant.
            current().set_item(item.point, item.name, "applied")

    def _watch(self, policy: KVPolicy, view: LayerView, layer: Any, config: Any) -> None:
        """Have a layer score blocks if the policy chooses it; raise ValueError if blocks cannot be scored."""
        from vllm_graft.bindings.attention.scoring import BlockScorer, unscorable

        if reason := unscorable(config):
            raise ValueError(reason)
        every: object = policy.score_every
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"score_every must be at least one step, but is {every!r}")
        self.score_every = every
        if layer is None:
            # The simulated accelerator has no layers, and makes scores up.
            return
        if self.scorer is None:
            self.scorer = BlockScorer(every)
        if policy.scores_layer(view):
            self.scorer.watch(view.name, layer)

    def watch_builder(self, names: Sequence[str]) -> Callable[[Any], None] | None:
        """Prove the layers that a metadata builder is made for; return what wants to see the rows of its steps."""
        self.prove_builder(names)
        return self.scorer.note_step if self.scorer is not None else None

    def table_meter(self) -> Meter:
        """Return the meter of the block tables, which are compacted once for each step and group of layers."""
        item, _ = self._planned()
        assert item is not None
        return current().hook(item.name, "compact", point(item.point).budget_us)

    def prepare(self, runner: Any, kv_cache_config: Any) -> None:
        """Check that some layer has what is planned, and make the buffers of those that score."""
        self.check_choice(runner.vllm_config)
        item, _ = self._planned()
        if item is None or self._refused:
            return
        if checked():
            self._prepare_check(item, runner, kv_cache_config.num_blocks)
        if self.scorer is None:
            return
        if not self.scorer.layers:
            self._refuse(item, "scores_layer()", "it chose no layer of the model, so no block is ever scored")
            return
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.scorer.allocate(kv_cache_config.num_blocks, block_size, runner.vllm_config, runner.device)
        # Its own, as another engine of this process has another scorer.
        runner.graft_scorer = self.scorer

    def _prepare_check(self, item: PlanItem, runner: Any, blocks: int) -> None:
        if reason := unchecked(runner.vllm_config):
            self._refuse(item, VARIABLE, reason)
            return
        # A stock kernel loads the null blocks of a window that the model gives a layer, and masks them.
        null = all(answer is not None or view.window is None for view, answer in self._answers.items())
        runner.graft_freed = FreedBlocks(blocks, null, current().figure(item.name, "KV blocks filled").set)

    def check_choice(self, config: Any) -> None:
        """Refuse a policy with which no layer of this model differs: no block would ever be freed."""
        item, policy = self._planned()
        # A pipeline stage may have none of the layers that are meant.
        if item is None or policy is None or self._refused or config.parallel_config.pipeline_parallel_size > 1:
            return
        if reason := _without_effect(policy, self.windows):
            self._refuse(item, "all layers", reason)

    def score_step(self, runner: Any, sample: Callable[[], Any]) -> Any:
        """Score blocks after the forward pass of a step, and return its output with the scores that have arrived."""
        scorer: BlockScorer | None = getattr(runner, "graft_scorer", None)
        if scorer is None:
            return sample()
        from vllm_graft.bindings.attention.scoring import step_requests

        scorer.score_step(step_requests(runner))
        return scorer.report(sample())

    def prove_groups(self, groups: Iterable[Any]) -> None:
        """Record the groups of layers with a window, if no metadata builder is ever made."""
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
        evicting, windowed = _evicting_managers(manager), _windowed_managers(manager)
        if any(type(spec).__name__ == "CrossAttentionSpec" for spec in groups):
            what = "the model has cross attention, but windows are for plain causal self-attention"
            self._refuse(item, "engine core", what)
            return
        if not evicting and (not any(windows) or _only_evicts(policy)):
            kinds = ", ".join(sorted({type(spec).__name__ for spec in groups})) or "none"
            what = f"no group of layers has a window from it, so no block is ever freed (KV caches: {kinds})"
            self._refuse(item, "engine core", what)
            return
        if evicting and len(groups) > 1:
            what = f"the model has {len(groups)} groups of layers, but blocks are evicted for all layers at once"
            self._refuse(item, "engine core", what)
            return
        decay: object = policy.score_decay
        if policy.wants_scores and not (isinstance(decay, int | float) and 0 <= decay < 1):
            self._refuse(item, "engine core", f"score_decay must be at least 0 and below 1, but is {decay!r}")
            return
        current().set_item(item.point, item.name, "applied")
        current().save()
        for each in evicting:
            each.ask, each.decay = _guarded_evict(item, policy), policy.score_decay
            each.on_lost_evictions = functools.partial(current().put_aside, item.name, _LOST_EVICTIONS)
        setattr(manager, _ASKING, evicting)
        setattr(manager, _WINDOWED, windowed)
        if windowed:
            ask = _guarded_window(item, policy) if _narrows(policy) else None
            setattr(manager, _STAMPS, (ask, tuple(policy.keys)))
        self.report_blocks = _block_reporter(manager, item.name, policy.wants_scores)

    def _planned(self) -> tuple[PlanItem | None, KVPolicy | None]:
        """Return the planned item and its instance, which is made on first use."""
        plan, run = inherited_plan(), inherited_run()
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
                fix=f"change [options.{item.name}], or remove it from the plan for this model",
            )


planned_layers: Final = PlannedLayers()
"""The layers of this process."""


def asking_managers(manager: Any) -> Sequence[EvictingManager]:
    """Return the managers of vLLM's ``KVCacheManager`` that ask the policy which blocks to evict."""
    found: Sequence[EvictingManager] = getattr(manager, _ASKING, ())
    return found


def windowed_managers(manager: Any) -> Sequence[SinkWindowManager]:
    """Return the managers of vLLM's ``KVCacheManager`` that free what has left a window."""
    found: Sequence[SinkWindowManager] = getattr(manager, _WINDOWED, ())
    return found


def stamp_request(manager: Any, request: Any) -> None:
    """Stamp a request with its own window if the policy of vLLM's ``KVCacheManager`` gives it one.

    No other stamp is left on it. Every request comes here, so nothing of the plan is read again.
    """
    stamps: tuple[Ask | None, Sequence[str]] | None = getattr(manager, _STAMPS, None)
    if stamps is not None and request.sampling_params is not None:
        stamp_window(request, *stamps)


def _evicts(policy: KVPolicy) -> bool:
    return type(policy).evict is not KVPolicy.evict


def _only_evicts(policy: KVPolicy) -> bool:
    return _evicts(policy) and type(policy).window is KVPolicy.window


def _without_effect(policy: KVPolicy, windows: Mapping[str, Answer]) -> str:
    """Return why no layer differs under a policy; empty if one does."""
    if any(answer is not None for answer in windows.values()):
        return ""
    if not windows:
        return "the model has no layer of plain causal self-attention"
    if _evicts(policy):
        return "the model gives each of its layers a window, but blocks are evicted in layers with full attention"
    return "it gives no layer a window, so no block is ever freed"


def _evicting_managers(manager: Any) -> list[EvictingManager]:
    from vllm_graft.bindings.attention.eviction import evicting_managers

    return evicting_managers(manager)


def _windowed_managers(manager: Any) -> list[SinkWindowManager]:
    from vllm_graft.bindings.attention.retention import SinkWindowManager

    return [each for each in manager.coordinator.single_type_managers if isinstance(each, SinkWindowManager)]


def _narrows(policy: KVPolicy) -> bool:
    """Return whether a policy gives single requests windows of their own."""
    return type(policy).request_window is not KVPolicy.request_window


def _guarded_window(item: PlanItem, policy: KVPolicy) -> Ask:
    """Return the policy's ``request_window``, guarded: requests have the planned window once it is put aside."""

    def request_window(keys: Mapping[str, object]) -> int | None:
        # A copy, so that a policy cannot change the request's own keys.
        return validate_window(policy.request_window(copy.deepcopy(dict(keys))))

    return guard_method(item, "request_window", request_window, current())


def _guarded_evict(item: PlanItem, policy: KVPolicy) -> Callable[[RequestBlocks], Collection[int] | None]:
    """Return the policy's ``evict``, guarded: an answer that cannot be followed costs the policy, not the engine."""
    from vllm_graft.bindings.attention.eviction import validate

    def evict(request: RequestBlocks) -> list[int]:
        # Taken before the policy sees the request, which it may change.
        evictable, request_id = frozenset(request.evictable), request.request_id
        return validate(policy.evict(request), evictable, request_id)

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
            raise ValueError("a KV connector brings whole prefixes, but evicted blocks would be missing")
        from vllm_graft.bindings.attention.eviction import EvictingSpec

        return EvictingSpec.of(spec)
    if not isinstance(window, Window):
        raise TypeError(f"window() must return a Window or None, but returned {window!r}")
    if any(type(tokens) is not int or tokens < 0 for tokens in (window.first, window.last)):
        raise ValueError(f"window() returned {window}, but both must be whole numbers of tokens, 0 or more")
    if reason := unserved():
        raise ValueError(reason)
    if view.window is not None:
        # The model was trained with it: narrower is another model, wider has no blocks to read.
        if window != Window(0, view.window):
            raise ValueError(
                f"the model gives this layer a window of {view.window} tokens, but the policy asks for {window}; only "
                f"Window(0, {view.window}) can be served"
            )
        return spec
    if config.kv_transfer_config is not None:
        raise ValueError("a KV connector brings the tokens of the window alone, but the first ones would be missing")
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        # vLLM then gives all layers one spec, and if they differ that of full attention.
        raise ValueError("vLLM's hybrid KV-cache manager is off, so layers cannot have windows of their own")
    from vllm_graft.bindings.attention.retention import SinkWindowSpec

    if window.last >= view.max_tokens:
        shape = WindowShape.whole(window.first, view.max_tokens, spec.block_size)
        return SinkWindowSpec.of(spec, shape, whole=True)
    return SinkWindowSpec.of(spec, WindowShape.fit(window.first, window.last, spec.block_size))


def _unserved(layer: Any, config: Any) -> str:
    """Return why a layer cannot have a window; empty if it can."""
    name = layer.attn_backend.get_name()
    if type(layer).__name__ != "Attention":
        return f"it is a {type(layer).__name__}, but windows are for plain causal self-attention"
    if name not in SERVED:
        return f"vLLM chose the backend {name} for it, but windows are served on {', '.join(SERVED)}"
    if getattr(layer.impl, "alibi_slopes", None) is not None:
        return "it has ALiBi, whose biases count the tokens in between, but a window leaves those out"
    if layer.sliding_window is None and (reader := _other_reader(layer, config)):
        return f"{reader} reads its KV cache too, and would read blocks that are freed"
    return unserved_cache(str(layer.kv_cache_dtype)) or unserved_engine(config)


def _other_reader(layer: Any, config: Any) -> str:
    """Return the name of a layer that shares this one's KV cache; empty if there is none.

    vLLM asks such a layer for no spec, so it keeps its stock backend.
    """
    layers: Mapping[str, Any] = config.compilation_config.static_forward_context
    readers = (
        name
        for name, other in layers.items()
        if getattr(other, "kv_sharing_target_layer_name", None) == layer.layer_name
    )
    return next(readers, "")


def unserved_engine(config: Any) -> str:
    """Return why no layer of an engine can have a window; empty if they can."""
    parallel = config.parallel_config
    if getattr(config.model_config, "is_mm_prefix_lm", False):
        return "its model attends to images in both directions"
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")):
        return "context parallelism gives each worker a part of every request"
    return ""


def unserved_cache(dtype: str) -> str:
    """Return why a KV cache of this type cannot have a window; empty if it can."""
    return "" if dtype in _PLAIN else f"its KV cache is quantized ({dtype}), which is not served yet"
