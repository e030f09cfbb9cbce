"""What planned samplers need of the engine's arguments, and when an engine cannot have them."""

import sys
from types import SimpleNamespace

import pytest

from vllm_graft.bindings.sampling import engine_arguments as room
from vllm_graft.bindings.sampling.engine_arguments import QUALNAME, arguments, unusable_samplers, user_processors
from vllm_graft.contracts import Key, Sampler
from vllm_graft.errors import ConfigError
from vllm_graft.plan import Plan, PlanItem


def plan(**options: object) -> Plan:
    return Plan((PlanItem("sampler", "force", "m:C", "p", ("worker",), options, "graft.toml:2"),))


def given(*processors: str) -> SimpleNamespace:
    return SimpleNamespace(logits_processors=list(processors) or None)


def test_the_users_own_logits_processors_are_kept():
    """Ours comes after them, once."""
    assert arguments(given("my.mod:Mine"), plan()) == {"logits_processors": ["my.mod:Mine", QUALNAME]}  # type: ignore[arg-type]
    assert arguments(given("my.mod:Mine", QUALNAME), plan())["logits_processors"].count(QUALNAME) == 1  # type: ignore[arg-type]
    assert arguments(given("my.mod:Mine"), Plan()) == {}  # type: ignore[arg-type]


def test_a_v2_runner_that_takes_no_samplers_is_refused(monkeypatch: pytest.MonkeyPatch):
    """In 0.26 to 0.30 the order VLLM_USE_V2_MODEL_RUNNER=1 and a sampler conflict."""
    monkeypatch.setattr(room, "v2_takes_samplers", lambda: False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(
        ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER=1: the sampler 'force' \(graft.toml:2\) cannot run"
    ):
        arguments(given(), plan())  # type: ignore[arg-type]
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    assert arguments(given(), plan())  # type: ignore[arg-type]


def engine(runner: str = "generate", *, drafts: bool = False, v2: bool = False) -> SimpleNamespace:
    model = SimpleNamespace(runner_type=runner)
    return SimpleNamespace(model_config=model, speculative_config=object() if drafts else None, use_v2_model_runner=v2)


def test_engines_that_cannot_have_samplers():
    """Pooling models, and the V1 runner with drafts; each with its reason."""
    assert unusable_samplers(engine(), plan()) == {}  # type: ignore[arg-type]
    assert unusable_samplers(engine(drafts=True, v2=True), plan()) == {}  # type: ignore[arg-type]
    assert "picks no tokens" in unusable_samplers(engine("pooling"), plan())["force"]  # type: ignore[arg-type]
    assert "speculative decoding" in unusable_samplers(engine(drafts=True), plan())["force"]  # type: ignore[arg-type]
    assert unusable_samplers(engine("pooling"), Plan()) == {}  # type: ignore[arg-type]


def test_a_required_sampler_stops_the_start():
    """Where else it would be left out."""
    with pytest.raises(ConfigError, match="the sampler 'force' is required but cannot be used: a pooling model"):
        unusable_samplers(engine("pooling"), plan(required=True))  # type: ignore[arg-type]


class Picks(Sampler):
    """Works token by token."""

    keys = (Key("picks", "bool", False, switch=True),)

    def sample(self, logits, params):
        return logits.argmax(-1)


def test_a_sampler_for_every_request_must_fit_the_drafts(monkeypatch: pytest.MonkeyPatch):
    """Nobody asks for it by a key that could be refused, so the start is."""
    monkeypatch.setitem(sys.modules, "draftless", SimpleNamespace(Picks=Picks))  # type: ignore[arg-type]

    def picks(**options: object) -> Plan:
        return Plan((PlanItem("sampler", "picks", "draftless:Picks", "p", ("worker",), options, "graft.toml:2"),))

    drafts = engine(drafts=True, v2=True)
    assert unusable_samplers(drafts, picks()) == {}  # type: ignore[arg-type]
    assert unusable_samplers(drafts, picks(defaults={"picks": False})) == {}  # type: ignore[arg-type]
    assert unusable_samplers(engine(v2=True), picks(defaults={"picks": True})) == {}  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'picks' is configured for every request .*speculative.*\[options.picks\]"):
        unusable_samplers(drafts, picks(defaults={"picks": True}))  # type: ignore[arg-type]


def test_the_users_own_processors_are_known():
    """By name, whether they were given as names or as classes."""
    config = SimpleNamespace(model_config=SimpleNamespace(logits_processors=["a.b:C", QUALNAME, Picks]))
    assert user_processors(config) == ["a.b:C", f"{__name__}:Picks"]  # type: ignore[arg-type]
    assert user_processors(engine()) == []  # type: ignore[arg-type]
