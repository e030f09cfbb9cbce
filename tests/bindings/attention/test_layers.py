"""What a layer gets of a planned policy, without an engine: windows that cannot be served are refused by name."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.bindings.attention import layers
from vllm_graft.contracts import KVPolicy, LayerView, Window
from vllm_graft.plan import PlanItem


def view(window: int | None = None, index: int = 0) -> LayerView:
    return LayerView(f"model.layers.{index}.self_attn.attn", index, 2, window, 4, 2, 32, 16, 2048)


def config(*, transfer: object = None, hybrid: bool = True) -> Any:
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    return SimpleNamespace(kv_transfer_config=transfer, scheduler_config=scheduler)


@pytest.mark.parametrize(
    ("answer", "of", "given", "reason"),
    [
        (Window(0, 256), view(512), config(), r"only Window\(0, 512\) can be served"),
        (Window(0, 256), view(), config(transfer=object()), "a KV connector brings the tokens of the window alone"),
        (Window(0, 256), view(), config(hybrid=False), "hybrid KV-cache manager is off"),
    ],
)
def test_a_window_that_cannot_be_served_is_refused(answer: Window, of: LayerView, given: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        layers._planned_spec(SimpleNamespace(block_size=16), of, answer, given, lambda: "")


def test_an_answer_that_is_no_window_is_refused():
    with pytest.raises(TypeError, match="must return a Window or None, but returned"):
        layers._planned_spec(SimpleNamespace(), view(), 256, config(), lambda: "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "last"),
    [(-1, 256), (0, -256), (4.5, 256), (0, 256.0), (0, float("nan")), ("4", 256), (True, 256), (None, 256)],
)
def test_a_window_has_whole_numbers_of_tokens(first: Any, last: Any):
    with pytest.raises(ValueError, match="both must be whole numbers of tokens, 0 or more"):
        layers._planned_spec(SimpleNamespace(block_size=16), view(), Window(first, last), config(), lambda: "")


class Attention(SimpleNamespace):
    """A layer as vLLM makes it, by its name and what is looked at."""


def served(layer: dict[str, Any] | None = None, others: dict[str, Any] | None = None, **engine: Any) -> str:
    """Return why a layer is not served."""
    name = view().name
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    plain = {"layer_name": name, "sliding_window": None, "kv_cache_dtype": "auto", "attn_backend": backend}
    made = Attention(**{**plain, "impl": SimpleNamespace(alibi_slopes=None), **(layer or {})})
    context = {name: made, "vision": SimpleNamespace(), **(others or {})}
    given = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        parallel_config=SimpleNamespace(decode_context_parallel_size=engine.get("context", 1)),
        model_config=SimpleNamespace(is_mm_prefix_lm=engine.get("images", False)),
    )
    return layers._unserved(made, given)


SHARES = {"model.layers.1": SimpleNamespace(kv_sharing_target_layer_name=view().name)}
FLEX = SimpleNamespace(get_name=lambda: "FLEX_ATTENTION")


@pytest.mark.parametrize(
    ("layer", "others", "engine", "reason"),
    [
        ({}, {}, {}, ""),
        ({"impl": SimpleNamespace(alibi_slopes=[1.0])}, {}, {}, "it has ALiBi"),
        ({"attn_backend": FLEX}, {}, {}, "vLLM chose the backend FLEX_ATTENTION for it"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, {}, "its KV cache is quantized"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, {}, {}, "its KV cache is quantized"),
        ({}, SHARES, {}, "model.layers.1 reads its KV cache too, and would read blocks that are freed"),
        # Nothing is freed that vLLM would not free for itself.
        ({"sliding_window": 128}, SHARES, {}, ""),
        ({}, {}, {"images": True}, "its model attends to images in both directions"),
        ({}, {}, {"context": 2}, "context parallelism gives each worker a part of every request"),
    ],
)
def test_a_layer_that_is_not_served_is_named_with_the_reason(layer, others, engine, reason):
    found = served(layer, others, **engine)
    assert reason in found if reason else not found


def test_other_kinds_of_layers_are_not_served():
    kind = type("CrossAttention", (Attention,), {})
    assert "it is a CrossAttention" in layers._unserved(kind(attn_backend=FLEX), None)


class Evicting(KVPolicy):
    """Frees blocks one by one."""

    def evict(self, request: Any) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("policy", "windows", "reason"),
    [
        (KVPolicy(), {}, "no layer of plain causal self-attention"),
        (KVPolicy(), {"a": None, "b": None}, "it gives no layer a window"),
        (KVPolicy(), {"a": None, "b": Window(0, 256)}, ""),
        (Evicting(), {"a": None}, "the model gives each of its layers a window"),
        (Evicting(), {"a": "evict"}, ""),
    ],
)
def test_a_policy_that_changes_nothing_is_refused(policy: KVPolicy, windows: Any, reason: str):
    found = layers._without_effect(policy, windows)
    assert reason in found if reason else not found


def test_a_layers_own_reason_comes_first():
    with pytest.raises(ValueError, match="it has ALiBi"):
        layers._planned_spec(SimpleNamespace(), view(), Window(0, 256), config(), lambda: "it has ALiBi")


def test_the_models_own_window_stays_as_it_is():
    spec = SimpleNamespace(block_size=16)
    assert layers._planned_spec(spec, view(512), Window(0, 512), config(hybrid=False), lambda: "") is spec


@pytest.mark.parametrize(("dtype", "plain"), [("auto", True), ("bfloat16", True), ("fp8_e4m3", False), ("int8", False)])
def test_quantized_caches_are_not_served(dtype: str, plain: bool):
    assert bool(layers.unserved_cache(dtype)) is not plain


class Book:
    """A ledger that remembers an item's state alone."""

    def set_item(self, point: str, name: str, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason

    def save(self) -> None:
        pass

    def figure(self, item: str, name: str) -> "Book":
        return self

    def set(self, number: int) -> None:
        pass


class TestStates:
    """The state of an item in a worker, under a plan that goes on without what it cannot have."""

    @pytest.fixture
    def ledger(self, monkeypatch: pytest.MonkeyPatch) -> Book:
        ledger = Book()
        monkeypatch.setattr(layers, "current", lambda: ledger)
        return ledger

    def planned(self, answers: Sequence[Window | str | None]) -> layers.PlannedLayers:
        """Layers of which each gets its answer; a word is raised."""

        class Policy(KVPolicy):
            def window(self, layer: LayerView) -> Window | None:
                self.asked.append(layer.name)
                answer = answers[layer.index]
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                return answer

        made = layers.PlannedLayers()
        made._plan = SimpleNamespace(strict=False)  # type: ignore[assignment]
        item = PlanItem("attention", "p", "m:P", "pkg", ("worker",))
        policy = Policy()
        self.asked = policy.asked = []
        made._planned = lambda: (item, policy)  # type: ignore[method-assign, assignment, return-value]
        self.ask(made, len(answers))
        return made

    def ask(self, made: layers.PlannedLayers, number: int, engine: Any = None) -> None:
        engine = engine or config()
        for index in range(number):
            # Their own window, which needs no other spec.
            made.adapt_spec(view(256, index), SimpleNamespace(block_size=16), engine)

    def test_a_window_is_not_in_use_before_it_is_proven(self, ledger: Book):
        made = self.planned([None, Window(0, 256), None])
        assert (ledger.state, ledger.reason) == ("armed", "no layer runs with its window yet")
        made.prove_builder([view(index=1).name])
        assert ledger.state == "applied"

    def test_a_stage_whose_layers_all_stay_as_they_are_is_complete(self, ledger: Book):
        self.planned([None, None])
        assert ledger.state == "applied"

    @pytest.mark.parametrize("rest", [(None,), (Window(0, 256), None), ("and again",)])
    def test_the_first_refusal_stands(self, ledger: Book, rest: tuple[Window | str | None, ...]):
        made = self.planned(["no idea", *rest])
        made.prove_builder([view(index=1).name])
        made.prove_groups([SimpleNamespace(layer_names=[view(index=1).name])])
        assert ledger.state == "refused"
        assert ledger.reason.startswith("model.layers.0.self_attn.attn: RuntimeError: no idea")

    def test_the_next_engine_of_a_process_begins_anew(self, ledger: Book):
        answers: list[Window | str | None] = ["no idea", Window(0, 256)]
        made = self.planned(answers)
        assert ledger.state == "refused"
        answers[0] = Window(0, 256)
        self.ask(made, 2)
        made.prove_builder([view().name, view(index=1).name])
        assert ledger.state == "applied"

    def test_a_layer_is_asked_about_once(self, ledger: Book):
        """vLLM wants its spec when it sizes the KV cache, and when it makes it."""
        made = self.planned([Window(0, 256), None])
        self.ask(made, 2, made._config)
        assert self.asked == [view().name, view(index=1).name]

    def managers(self, *names: str) -> Any:
        """A KV-cache manager of engine core whose groups have specs of these kinds."""
        specs = [
            type(name, (SimpleNamespace,), {})(sliding_window=128 if "Sliding" in name else None) for name in names
        ]
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        coordinator = SimpleNamespace(single_type_managers=[])
        return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups), coordinator=coordinator)

    @pytest.mark.parametrize(
        ("kinds", "reason"),
        [
            (("FullAttentionSpec", "CrossAttentionSpec"), "the model has cross attention"),
            (("MLAAttentionSpec",), "no block is ever freed (KV caches: MLAAttentionSpec)"),
            ((), "no block is ever freed (KV caches: none)"),
        ],
    )
    def test_engine_core_refuses_caches_without_a_window(self, ledger: Book, kinds: tuple[str, ...], reason: str):
        pytest.importorskip("vllm_graft.bindings.attention.eviction")
        self.planned([None]).prove_managers(self.managers(*kinds))
        assert ledger.state == "refused"
        assert reason in ledger.reason

    def test_engine_core_refuses_a_policy_that_could_evict_nothing(self, ledger: Book):
        """The windows of the model are not its own work."""
        pytest.importorskip("vllm_graft.bindings.attention.eviction")
        made = self.planned([None])
        made._planned = lambda: (PlanItem("attention", "p", "m:P", "pkg", ("worker",)), Evicting())  # type: ignore
        made.prove_managers(self.managers("SlidingWindowSpec"))
        assert ledger.state == "refused"

    def test_layers_of_one_group_have_one_window(self, ledger: Book):
        made = self.planned([Window(0, 256), None])
        made.prove_builder([view().name, view(index=1).name])
        assert ledger.state == "refused"
        assert "vLLM put it into one group with model.layers.0.self_attn.attn" in ledger.reason
