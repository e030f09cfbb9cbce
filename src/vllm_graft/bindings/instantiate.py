"""Planned items: import the class and call it, or record why that cannot be done; guard the methods."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, TypeVar

from vllm_graft.contracts.item import Item, OptionValue
from vllm_graft.contracts.sampling import OptInSampler
from vllm_graft.errors import GraftError, StartError
from vllm_graft.ledger import Guard, Ledger
from vllm_graft.ledger.guard import raised_by_signal, reason_of
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.plan.catalogue import load
from vllm_graft.points import point

_LOG: Final = logging.getLogger("vllm.graft")
SLOW_START_S: Final = 10.0
"""The seconds between two warnings that the start still waits for a plugin."""

T = TypeVar("T", bound=Item)


def instantiate(
    item: PlanItem,
    contract: type[T] | tuple[type[T], ...],
    plan: Plan,
    ledger: Ledger,
    fit: Callable[[T], None] = lambda made: None,
    provided: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> T | None:
    """Instantiate an item, which must implement the contract or one of several, and record it as applied.

    ``fit`` adapts it to its engine. Its constructor gets the options, and the parameters that ``provided`` names.

    An item that cannot be instantiated is recorded as refused. A strict plan then stops the start; any other goes on
    without it, and None is returned.
    """
    try:
        # Imports here may take minutes (kernels that compile), in the middle of a start that prints nothing.
        with warn_if_slow(f"{item.point} {item.name!r} is made"):
            kind = load(item.target, item.name, item.package)
            args, kwargs = _arguments(kind, dict(item.options), provided)
            made = kind(*args, **kwargs)
        if not isinstance(made, contract):
            names = [each.__name__ for each in (contract if isinstance(contract, tuple) else (contract,))]
            raise TypeError(
                f"{item.target} made a {type(made).__name__}, which does not implement {' or '.join(names)}"
            )
        if not hasattr(made, "_options"):
            # Its constructor does not call that of Item, and option() would fail with the first request.
            # A frozen dataclass allows no plain assignment.
            object.__setattr__(made, "_options", {**type(made).options, **item.options})
        fit(made)
    # SystemExit too: a plugin that calls sys.exit() must not end the engine without a reason in its record.
    except BaseException as error:
        reason = failure_reason(error)
        ledger.set_item(item.point, item.name, "refused", reason)
        ledger.save()
        if not plan.strict:
            return None
        raise StartError(
            f"{item.point} {item.name!r} (from {item.origin}) cannot be made: {reason}",
            where=item.target,
            fix="fix the item or its options, or remove it from the plan",
        ) from error
    ledger.set_item(item.point, item.name, "applied")
    ledger.save()
    return made


def _arguments(
    kind: type, options: dict[str, OptionValue], provided: Mapping[str, Callable[[], object]]
) -> tuple[list[object], dict[str, object]]:
    """Return the arguments for a constructor: the first parameter that is not in ``provided`` gets the options.

    ``*args`` and ``**kwargs`` count as parameters, the latter for an argument ``options``: a constructor that only
    passes its arguments on must not lose them.
    """
    parameters = list(inspect.signature(kind).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    kinds = {each.kind for each in parameters}
    args: list[object] = []
    kwargs: dict[str, object] = {name: provided[name]() for name in by_name if name in provided}
    for number, each in enumerate(positional):
        if each.name in provided:
            args.append(provided[each.name]())
            continue
        args.append(options)
        rest = positional[number + 1 :]
        kwargs |= {later.name: provided[later.name]() for later in rest if later.name in provided}
        return args, kwargs
    free = [name for name in by_name if name not in provided]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        args.append(options)
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        kwargs["options"] = options
    elif free:
        kwargs["options" if "options" in free else free[0]] = options
    else:
        # A constructor may do without the options that every sampler has: the binding itself reads those.
        defaults = {**getattr(kind, "options", {}), **{name: options.get(name) for name in OptInSampler.options}}
        if lost := [name for name, value in options.items() if value != defaults.get(name)]:
            raise TypeError(f"the constructor of {kind.__name__} takes no options, but the plan sets {', '.join(lost)}")
    return args, kwargs


def guard_method(
    item: PlanItem,
    method: str,
    call: Callable[..., Any],
    ledger: Ledger,
    *,
    budget_us: float | None = None,
    on_aside: Callable[[str], None] | None = None,
) -> Guard[..., Any]:
    """Guard a method of an item: metered under its name, and answered with None once the item is put aside.

    ``budget_us`` is the point's own unless given; ``on_aside`` replaces the note in the ledger that the item is aside.
    """
    meter = ledger.hook(item.name, method, point(item.point).budget_us if budget_us is None else budget_us)
    # None in place of an answer: what vLLM does without the item goes on.
    return Guard(call, lambda *args: None, meter, on_aside or functools.partial(ledger.put_aside, item.name))


def failure_reason(error: BaseException) -> str:
    """Return why an item could not be instantiated or set up, for its record; raise again what a signal raised."""
    if raised_by_signal(error):
        raise error
    return str(error) if isinstance(error, GraftError) else reason_of(error)


@contextmanager
def warn_if_slow(doing: str) -> Iterator[None]:
    """Log every ``SLOW_START_S`` that the start waits for a plugin: from outside, vLLM seems to hang."""
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
