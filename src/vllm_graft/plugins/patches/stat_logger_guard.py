"""``stat-logger-guard``: a stat logger that raises no longer fails every later request.

vLLM calls its stat loggers inside the task that hands outputs to requests. One exception there ends that task: the
request at hand and all later ones answer 500 and ``/health`` answers 503 until the server is restarted. With this
patch the logger that raised is put aside, with its error in the record, and everything else goes on.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.ledger import Guard, current
from vllm_graft.patching import VLLMPatch, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOG: Final = logging.getLogger("vllm.graft")
_NAME: Final = "stat-logger-guard"
# All that StatLoggerManager calls; record_admission_rejection is there from 0.32 on.
_METHODS: Final = ("record", "log", "log_engine_initialized", "record_sleep_state", "record_admission_rejection")


class StatLoggerGuard(
    VLLMPatch["vllm.v1.metrics.loggers:StatLoggerManager"],
    name=_NAME,
    vllm=">=0.26,<0.33",
    why="an exception in a stat logger ends the output handler: every later request fails",
    upstream="vllm/v1/engine/async_llm.py, AsyncLLM._run_output_handler",
    remove_when="vLLM catches what a stat logger raises",
    processes={"frontend"},
):
    """Call every foreign stat logger through a guard."""

    @wrap
    def __init__(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        call(*args, **kwargs)
        for logger in _foreign(self.stat_loggers):
            _guard(logger)


def _foreign(loggers: list[Any]) -> Iterator[Any]:
    """Find the loggers that are neither vLLM's nor ours, those inside vLLM's per-engine adapter included."""
    for logger in loggers:
        yield from _foreign(list(getattr(logger, "per_engine_stat_loggers", {}).values()))
        if not type(logger).__module__.startswith(("vllm.", "vllm_graft.")):
            yield logger


def _guard(logger: Any) -> None:
    ledger = current()
    name = f"{type(logger).__module__}.{type(logger).__qualname__}"
    guards: list[Guard[..., Any]] = []
    for method in _METHODS:
        call = getattr(logger, method, None)
        if call is None:
            continue
        meter = ledger.hook(_NAME, f"{name}.{method}")
        guards.append(Guard(call, _ignore, meter, functools.partial(_put_aside, guards, f"{name}.{method}")))
        try:
            # On the instance: vLLM looks methods up there, and the class may belong to several loggers.
            setattr(logger, method, guards[-1])
        except AttributeError:
            _LOG.warning("vllm-graft: the stat logger %s has __slots__ and cannot be guarded", name)
            return


def _put_aside(guards: list[Guard[..., Any]], what: str, reason: str) -> None:
    """Stop calling a logger of which one method raised: its state cannot be trusted."""
    for guard in guards:
        guard.aside = reason
    current().note_error(_NAME, f"stat logger {what} is put aside; the server continues: {reason}")


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for a method of a logger that was put aside."""
