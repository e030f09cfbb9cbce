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
    with pytest.raises(TypeError, match="which is no Window"):
        layers._planned_spec(SimpleNamespace(), view(), 256, config(), lambda: "")  # type: ignore[arg-type]


def test_a_layers_own_reason_comes_first():
    with pytest.raises(ValueError, match="it has ALiBi"):
        layers._planned_spec(SimpleNamespace(), view(), Window(0, 256), config(), lambda: "it has ALiBi")


def test_the_models_own_window_stays_as_it_is():
    spec = SimpleNamespace(block_size=16)
    assert layers._planned_spec(spec, view(512), Window(0, 512), config(hybrid=False), lambda: "") is spec


@pytest.mark.parametrize(
    ("dtype", "served"), [("auto", True), ("bfloat16", True), ("fp8_e4m3", False), ("int8", False)]
)
def test_quantized_caches_are_not_served(dtype: str, served: bool):
    assert bool(layers.unserved_cache(dtype)) is not served


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
    def book(self, monkeypatch: pytest.MonkeyPatch) -> Book:
        book = Book()
        monkeypatch.setattr(layers, "current", lambda: book)
        return book

    def planned(self, answers: Sequence[Window | str | None]) -> layers.PlannedLayers:
        """Layers of which each gets its answer; a word is raised."""

        class Policy(KVPolicy):
            def window(self, layer: LayerView) -> Window | None:
                answer = answers[layer.index]
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                return answer

        made = layers.PlannedLayers()
        made._plan = SimpleNamespace(strict=False)  # type: ignore[assignment]
        item = PlanItem("attention", "p", "m:P", "pkg", ("worker",))
        made._planned = lambda: (item, Policy())  # type: ignore[method-assign, assignment, return-value]
        self.ask(made, len(answers))
        return made

    def ask(self, made: layers.PlannedLayers, number: int) -> None:
        engine = config()
        for index in range(number):
            # Their own window, which needs no other spec.
            made.adapt_spec(view(256, index), SimpleNamespace(block_size=16), engine)

    def test_a_window_is_not_in_use_before_it_is_proven(self, book: Book):
        made = self.planned([None, Window(0, 256), None])
        assert (book.state, book.reason) == ("armed", "no layer runs with its window yet")
        made.prove_builder([view(index=1).name])
        assert book.state == "applied"

    def test_a_stage_whose_layers_all_stay_as_they_are_is_complete(self, book: Book):
        self.planned([None, None])
        assert book.state == "applied"

    @pytest.mark.parametrize("rest", [(None,), (Window(0, 256), None), ("and again",)])
    def test_the_first_refusal_stands(self, book: Book, rest: tuple[Window | str | None, ...]):
        made = self.planned(["no idea", *rest])
        made.prove_builder([view(index=1).name])
        made.prove_groups([SimpleNamespace(layer_names=[view(index=1).name])])
        assert book.state == "refused"
        assert book.reason.startswith("model.layers.0.self_attn.attn: RuntimeError: no idea")

    def test_the_next_engine_of_a_process_begins_anew(self, book: Book):
        answers: list[Window | str | None] = ["no idea", Window(0, 256)]
        made = self.planned(answers)
        assert book.state == "refused"
        answers[0] = Window(0, 256)
        self.ask(made, 2)
        made.prove_builder([view().name, view(index=1).name])
        assert book.state == "applied"

    def test_layers_of_one_group_have_one_window(self, book: Book):
        made = self.planned([Window(0, 256), None])
        made.prove_builder([view().name, view(index=1).name])
        assert book.state == "refused"
        assert "vLLM put it into one group with model.layers.0.self_attn.attn" in book.reason
