"""Making a planned item: import its class and call it, or say why that cannot be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm_graft.contracts.item import Item
from vllm_graft.errors import GraftError, StartError
from vllm_graft.ledger import Ledger
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load

T = TypeVar("T", bound=Item)


def make(
    item: PlanItem,
    contract: type[T] | tuple[type[T], ...],
    plan: Plan,
    ledger: Ledger,
    fit: Callable[[T], None] = lambda made: None,
) -> T | None:
    """The item, of the contract or of one of several, fitted to its engine by ``fit``, and recorded as applied.

    One that cannot be made is recorded as refused; a strict plan then stops the start, any other goes on without it:
    None.
    """
    try:
        made = load(item.target, item.name, item.package)(dict(item.options))
        if not isinstance(made, contract):
            names = [each.__name__ for each in (contract if isinstance(contract, tuple) else (contract,))]
            raise TypeError(f"{item.target} made a {type(made).__name__}, which is no {' and no '.join(names)}")
        fit(made)
    except Exception as error:
        reason = str(error) if isinstance(error, GraftError) else f"{type(error).__name__}: {error}"
        ledger.set_item(item.point, item.name, "refused", reason)
        ledger.save()
        if not plan.strict:
            return None
        raise StartError(
            f"{item.point} {item.name!r} (from {item.origin}) cannot be made: {reason}",
            where=item.target,
            fix="mend the item or its options, or take it out of the plan",
        ) from error
    ledger.set_item(item.point, item.name, "applied")
    ledger.save()
    return made
