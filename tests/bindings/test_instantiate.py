"""Making a planned item: what its constructor is called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from vllm_graft.bindings.instantiate import guard_method, instantiate
from vllm_graft.contracts import SamplingStrategy
from vllm_graft.errors import StartError
from vllm_graft.ledger import Ledger
from vllm_graft.plan import Plan, PlanItem

PROVIDED: dict[str, Callable[[], object]] = {"tokenizer": lambda: "the tokenizer", "model": lambda: "the model"}


class Plain(SamplingStrategy):
    """Has an option."""

    keys = ("plain",)
    options: ClassVar = {"strength": 1.0}
    tokenizer: object = None


class HandsOn(Plain):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class HandsOnByName(Plain):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class PositionalOnly(Plain):
    def __init__(self, options=None, /):
        super().__init__(options)


class KeywordOnly(Plain):
    def __init__(self, *, verbose=False, options=None):
        assert verbose is False
        super().__init__(options)


class StarThenName(Plain):
    def __init__(self, *args, verbose=False):
        assert verbose is False
        super().__init__(*args)


class TokenizerFirst(Plain):
    def __init__(self, tokenizer, *args):
        super().__init__(*args)
        self.tokenizer = tokenizer


class TokenizerLast(Plain):
    def __init__(self, settings=None, verbose=False, tokenizer=None):
        assert verbose is False
        super().__init__(settings)
        self.tokenizer = tokenizer


class NoSuper(Plain):
    def __init__(self, options=None):
        self.tokenizer = None


@dataclass(frozen=True)
class Frozen(Plain):
    options: ClassVar = {"strength": 1.0}

    def __init__(self, options=None):
        pass


class TokenizerOnly(Plain):
    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer


def made(kind: type[Plain], monkeypatch: pytest.MonkeyPatch, **options: float) -> Plain:
    monkeypatch.setattr("vllm_graft.bindings.instantiate.load", lambda target, name, package: kind)
    item = PlanItem("sampler", "plain", "tests:Plain", "tests", ("worker",), {**kind.options, **options})
    found = instantiate(item, Plain, Plan((item,)), Ledger(), provided=PROVIDED)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "kind",
    [
        Plain,
        HandsOn,
        HandsOnByName,
        PositionalOnly,
        KeywordOnly,
        StarThenName,
        NoSuper,
        Frozen,
        TokenizerFirst,
        TokenizerLast,
    ],
    ids=lambda kind: kind.__name__,
)
def test_options_reach_every_constructor_that_can_take_them(kind: type[Plain], monkeypatch: pytest.MonkeyPatch):
    """By name, by position, through ``*args`` and ``**kwargs``, or though the constructor forgets its base class."""
    found = made(kind, monkeypatch, strength=5.0)
    assert found.option("strength") == 5.0
    assert found.tokenizer == ("the tokenizer" if "Tokenizer" in kind.__name__ else None)


def test_a_constructor_that_takes_no_options_loses_none(monkeypatch: pytest.MonkeyPatch):
    """It is made while every option of its own has the default, and refused by name where one has not."""
    assert made(TokenizerOnly, monkeypatch, budget_us=9).tokenizer == "the tokenizer"
    with pytest.raises(StartError, match="constructor of TokenizerOnly takes no options, but the plan sets strength"):
        made(TokenizerOnly, monkeypatch, strength=5.0)


def test_a_guarded_method_answers_with_none_once_its_item_is_put_aside():
    ledger, answers = Ledger(), iter((1, None))
    item = PlanItem("stats", "sink", f"{__name__}:Sink", "vllm-graft", ("frontend",))

    def method(number: int) -> float:
        return number / next(answers)

    guard = guard_method(item, "finished", method, ledger)
    assert guard(2) == 2
    assert guard(2) is None
    assert guard(2) is None
    assert "unsupported operand" in guard.aside


def test_the_owner_of_a_guarded_method_may_be_told_instead_of_the_ledger():
    reasons: list[str] = []
    item = PlanItem("stats", "sink", f"{__name__}:Sink", "vllm-graft", ("frontend",))
    guard_method(item, "finished", lambda: [][0], Ledger(), on_aside=reasons.append)()
    (reason,) = reasons
    assert reason.startswith("IndexError: list index out of range")
