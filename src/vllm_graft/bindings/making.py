"""Making a planned item: import its class and call it, or say why that cannot be done."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, TypeVar

from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.errors import GraftError, StartError
from vllm_graft.ledger import Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load

_LOG: Final = logging.getLogger("vllm.graft")
SLOW_START_S: Final = 10.0
"""How often the log says that a start still waits for a plugin."""

T = TypeVar("T", bound=Item)


def make(
    item: PlanItem,
    contract: type[T] | tuple[type[T], ...],
    plan: Plan,
    ledger: Ledger,
    fit: Callable[[T], None] = lambda made: None,
    provided: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> T | None:
    """The item, of the contract or of one of several, fitted to its engine by ``fit``, and recorded as applied.

    Its constructor is given the options, and by name what it asks for of ``provided``.

    One that cannot be made is recorded as refused; a strict plan then stops the start, any other goes on without it:
    None.
    """
    try:
        with say_if_slow(f"{item.point} {item.name!r} is made"):
            kind = load(item.target, item.name, item.package)
            made = kind(**_arguments(kind, dict(item.options), provided))
        if not isinstance(made, contract):
            names = [each.__name__ for each in (contract if isinstance(contract, tuple) else (contract,))]
            raise TypeError(f"{item.target} made a {type(made).__name__}, which is no {' and no '.join(names)}")
        fit(made)
    except BaseException as error:
        reason = why_not(error)
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


def _arguments(
    kind: type, options: dict[str, OptionValue], provided: Mapping[str, Callable[[], object]]
) -> dict[str, object]:
    """What a constructor is called with: the first parameter that is none of ``provided`` gets the options."""
    parameters = inspect.signature(kind).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    found: dict[str, object] = {name: provided[name]() for name in named if name in provided}
    first = next((name for name in named if name not in provided), None)
    return found if first is None else {first: options, **found}


def why_not(error: BaseException) -> str:
    """Why an item could not be made or set up, in words for its record; what a signal raised is raised again."""
    if raised_by_signal(error):
        raise error
    return str(error) if isinstance(error, GraftError) else reason_of(error)


@contextmanager
def say_if_slow(doing: str) -> Iterator[None]:
    """Say in the log, again and again, that a start waits for a plugin: from outside it looks as if vLLM hung."""
    started, done = time.monotonic(), threading.Event()

    def watch() -> None:
        while not done.wait(SLOW_START_S):
            seconds = time.monotonic() - started
            _LOG.warning("vllm-graft: the start has waited for %.0f s while %s", seconds, doing)

    threading.Thread(target=watch, name="graft-slow-start", daemon=True).start()
    try:
        yield
    finally:
        done.set()
