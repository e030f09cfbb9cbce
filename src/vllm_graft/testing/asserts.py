"""Assertions on the ledger: what must be active, and what must have been called."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_graft.ledger import ProcessView, RunView
from vllm_graft.points import Role


def assert_active(view: RunView | None, item: str, *, roles: Iterable[Role] | None = None) -> list[ProcessView]:
    """Assert that an item is active in every living process that needs it, and that each of the roles has one.

    Returns those processes. Without ``roles``, the roles are the ones the plan gives the item.
    """
    assert view is not None, "the server left no record: it ran without a plan, or with another state folder"
    planned = next((planned for planned in view.plan if planned.name == item), None)
    assert planned is not None, f"{item!r} is not in the plan: {[planned.name for planned in view.plan]}"
    wanted = set(planned.roles if roles is None else roles)
    living = [process for process in view.processes if process.life in ("running", "unknown")]
    found = [process for process in living if wanted.intersection(process.record.roles)]
    for process in found:
        state = process.record.item(item)
        place = f"{process.record.name} (pid {process.record.pid})"
        assert state is not None, f"{item!r} is not known in {place}"
        assert state.state in ("applied", "armed"), f"{item!r} is {state.state} in {place}: {state.reason}"
    seen = {role for process in found for role in process.record.roles}
    missing = wanted - seen - ({"registry"} if roles is None else set())
    assert not missing, f"no process with the role {sorted(missing)} recorded anything"
    return found


def assert_called(view: RunView | None, item: str, *, at_least: int = 1) -> int:
    """Assert that an item's hooks were called, over all processes together; return how often."""
    assert view is not None, "the server left no record: it ran without a plan, or with another state folder"
    calls = sum(process.calls(item) for process in view.processes)
    assert calls >= at_least, f"{item!r} was called {calls} times, at least {at_least} expected"
    return calls
