"""A plan on its way to a child process."""

import os

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.plan import Plan, PlanItem, Run, clear_exported_plan, export_plan, inherited_plan, inherited_run


def test_what_is_carried_arrives(monkeypatch: pytest.MonkeyPatch):
    """Plan and run survive the environment."""
    plan = Plan((PlanItem("stats", "s", "m:C", "p", ("frontend",), {"a": 1}, "here"),), model="m")
    run = Run("1-ab", 1, "V1", "pkg.Ext")
    monkeypatch.setenv("GRAFT_PLAN", "")
    monkeypatch.setenv("GRAFT_RUN", "")
    assert inherited_plan() is None
    assert inherited_run() is None
    export_plan(plan, run)
    assert inherited_plan() == plan
    assert inherited_run() == run
    clear_exported_plan()
    assert "GRAFT_PLAN" not in os.environ
    assert inherited_plan() is None


def test_a_plan_too_large_for_the_environment_is_refused():
    """Linux would refuse to start the child, with a message that helps nobody."""
    plan = Plan((PlanItem("stats", "s", "m:C", "p", ("frontend",), {"a": "x" * 200_000}, "here"),))
    with pytest.raises(ConfigError, match="at most 100000 can be carried"):
        export_plan(plan, Run("1-ab", 1))


@pytest.mark.parametrize("text", ["nonsense", "{}", '{"items": [{"point": 1}]}', "[" * 100_000])
def test_a_damaged_variable_is_named(text: str, monkeypatch: pytest.MonkeyPatch):
    """Somebody else's value in our variable is an error with its name."""
    monkeypatch.setenv("GRAFT_PLAN", text)
    monkeypatch.setenv("GRAFT_RUN", text)
    with pytest.raises(ConfigError, match="GRAFT_PLAN: does not hold a plan"):
        inherited_plan()
    with pytest.raises(ConfigError, match="GRAFT_RUN: does not hold a run"):
        inherited_run()
