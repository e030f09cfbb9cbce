"""Our part of the server's ``/metrics``: queue statistics, and the state and cost of every planned item.

Both are read from the files of the run at each scrape, so every API server shows the same numbers. A route of ours goes
before vLLM's: it writes vLLM's registry as vLLM does, and appends our lines. It runs in a thread, not on the event
loop, and keeps the lines of rows that have not changed: a thousand tenants are twenty thousand lines, and
prometheus_client would take half a second to write them.
"""

from __future__ import annotations

import gzip
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from vllm_graft import ledger
from vllm_graft.ledger.comparison import findings_of
from vllm_graft.ledger.guard import reason_of
from vllm_graft.ledger.queue_statistics import EDGES
from vllm_graft.plan import Plan

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

_LOG: Final = logging.getLogger("vllm.graft")

MetricKind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric with its samples, each a line of the text format."""

    name: str
    kind: MetricKind
    words: str
    lines: Sequence[str]

    def text(self, *, openmetrics: bool) -> str:
        """Render the family in the text format; OpenMetrics wants a counter's name without ``_total``."""
        name = self.name.removesuffix("_total") if openmetrics else self.name
        return f"# HELP {name} {self.words}\n# TYPE {name} {self.kind}\n{''.join(self.lines)}"


_QUEUE: Final = "vllm_graft_queue_"
_WAITS: Final = _QUEUE + "wait_seconds"

_QUEUE_METRICS: Final[dict[str, tuple[str, MetricKind, str]]] = {
    "waiting": ("waiting", "gauge", "Requests that wait."),
    "running": ("running", "gauge", "Requests that were admitted and have not ended."),
    "admitted": ("admitted_total", "counter", "Requests that were admitted, each once."),
    "refused": ("refused_total", "counter", "Requests that engine core turned away."),
    "ended": ("ended_total", "counter", "Requests that ended after they were admitted."),
    "aborted": ("aborted_total", "counter", "Requests that were gone before they were admitted."),
    "tokens": ("tokens_total", "counter", "Tokens that were scheduled, of prompts and answers."),
}


class QueueLines:
    """Renders queue statistics as families; keeps the lines of unchanged rows between two scrapes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, str], tuple[ledger.LabelStatistics, str, tuple[str, ...]]] = {}

    def families(self, queues: Sequence[ledger.QueueSnapshot]) -> Iterator[MetricFamily]:
        """Yield every family, with a sample for each engine and each value of each label."""
        before, self._kept = self._kept, {}
        rows = []
        for queue in queues:
            for row in queue.rows:
                key = (queue.engine, row.label, row.value)
                kept = before.get(key)
                if kept is None or kept[0] is not row:
                    labels = _labels(engine=str(queue.engine), by=row.label, value=row.value)
                    metrics = _QUEUE_METRICS.items()
                    lines = [_sample(_QUEUE + name, labels, getattr(row, field)) for field, (name, _, _) in metrics]
                    below, buckets = 0, ""
                    for edge, number in zip((*map(str, EDGES), "+Inf"), row.buckets, strict=True):
                        below += number
                        buckets += f'{_WAITS}_bucket{{{labels},le="{edge}"}} {below}\n'
                    buckets += _sample(_WAITS + "_count", labels, below) + _sample(
                        _WAITS + "_sum", labels, row.wait_sum
                    )
                    kept = (row, labels, (*lines, buckets))
                self._kept[key] = kept
                rows.append(kept)
        for index, (name, kind, words) in enumerate(_QUEUE_METRICS.values()):
            yield MetricFamily(_QUEUE + name, kind, words, [lines[index] for _, _, lines in rows])
        shares = (share for queue in queues for share in queue.shares())
        lines = [_sample(_QUEUE + "token_share", kept[1], share) for kept, share in zip(rows, shares, strict=True)]
        yield MetricFamily(_QUEUE + "token_share", "gauge", "Share of the last minute's tokens.", lines)
        yield MetricFamily(
            _WAITS, "histogram", "From arrival to the first admission.", [lines[-1] for _, _, lines in rows]
        )


_ITEM: Final = "vllm_graft_item_"

_ELSEWHERE: Final = ("S007",)
"""Findings that need the records of all machines; only those of this one are read here."""


def item_families(views: Sequence[ledger.ProcessView], plan: Plan, damaged: int = 0) -> Iterator[MetricFamily]:
    """Yield the states and costs of planned items on this machine, by item and role.

    Processes of one role are added up, so the number of lines does not grow with theirs.
    """
    living = [view for view in views if view.life in ("running", "unknown")]
    lives = Counter((_role(view), view.life) for view in views if view.life != "ended")
    yield _family("vllm_graft_processes", "gauge", "Processes of this server.", ("role", "life"), lives.items())
    states = Counter((item.point, item.name, _role(view), item.state) for view in living for item in view.record.items)
    words = "Processes in which a planned item is in this state."
    yield _family(_ITEM + "processes", "gauge", words, ("point", "item", "role", "state"), states.items())
    calls, errors, overruns, seconds, reported = (defaultdict[LabelValues, float](int) for _ in range(5))
    worst: dict[LabelValues, float] = {}
    budgets: dict[LabelValues, float] = {}
    for view in views:
        for item in view.record.items:
            own = (item.point, item.name, _role(view))
            for hook, found in view.readings.get(item.name, {}).items():
                key = (*own, hook)
                calls[key] += found.calls
                errors[key] += found.errors
                if found.budget_us is not None:
                    overruns[key] += found.overruns
                    seconds[key] += found.mean_us * found.calls / 1e6
                    worst[key] = max(worst.get(key, 0.0), found.p99_us / 1e6)
                    budgets[key] = found.budget_us / 1e6
            if view.life in ("running", "unknown"):
                for figure, number in view.figures.get(item.name, {}).items():
                    reported[*own, figure] += number
    families: tuple[tuple[str, MetricKind, str, dict[LabelValues, float]], ...] = (
        ("calls_total", "counter", "Calls of an item's hooks.", calls),
        ("errors_total", "counter", "Calls that raised.", errors),
        ("overruns_total", "counter", "Calls over the budget.", overruns),
        ("seconds_total", "counter", "Time spent in calls.", seconds),
        ("p99_seconds", "gauge", "What 99 of 100 calls took at most, in the slowest process.", worst),
        ("budget_seconds", "gauge", "What a call may take.", budgets),
    )
    for name, kind, words, values in families:
        yield _family(_ITEM + name, kind, words, ("point", "item", "role", "hook"), values.items())
    words = "Figures that an item reports of itself, added up over processes."
    yield _family(_ITEM + "figure", "gauge", words, ("point", "item", "role", "figure"), reported.items())
    findings = Counter[LabelValues](
        (finding.code, finding.level)
        for finding in findings_of([view.as_dict() for view in views], plan)
        if finding.code not in _ELSEWHERE
    )
    if damaged:
        findings["S018", "error"] = damaged
    words = "Findings of vllm-graft status on this machine."
    yield _family("vllm_graft_findings", "gauge", words, ("code", "level"), findings.items())


LabelValues = tuple[str, ...]


def _family(
    name: str, kind: MetricKind, words: str, labels: Sequence[str], values: Iterable[tuple[LabelValues, float]]
) -> MetricFamily:
    lines = [_sample(name, _labels(**dict(zip(labels, key, strict=True))), value) for key, value in sorted(values)]
    return MetricFamily(name, kind, words, lines)


def _role(view: ledger.ProcessView) -> str:
    return "+".join(view.record.roles)


def _sample(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {value}\n"


def _labels(**labels: str) -> str:
    pairs = []
    # In the order of their names, as prometheus_client writes them.
    for name, value in sorted(labels.items()):
        escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        # Lone surrogates are replaced: no encoding takes them.
        pairs.append(f'{name}="{escaped if escaped.isascii() else escaped.encode("utf-8", "replace").decode()}"')
    return ",".join(pairs)


class Exposition:
    """Renders our families as text, from the files of this process's run."""

    def __init__(self, plan: Plan, find_ledger: Callable[[], ledger.Ledger] = ledger.current) -> None:
        self._plan = plan
        self._find_ledger = find_ledger
        self._lock = threading.Lock()
        self._queues = QueueLines()
        self._home: Path | None = None
        self._statistics = ledger.StatisticsReader(None)
        self._failure = ""

    def text(self, *, openmetrics: bool = False, names: Sequence[str] = ()) -> str:
        """Return every family, or those that have a sample of these names."""
        with self._lock:
            home = self._find_ledger().home
            if home != self._home:
                self._home, self._statistics = home, ledger.StatisticsReader(home)
            families: list[MetricFamily] = []
            if self._plan.of("scheduler"):
                families += self._queues.families(self._statistics.queues())
            own = self._find_ledger().view()
            views, damaged = ledger.read_processes(home)
            if own is not None and all(view.record.pid != own.record.pid for view in views):
                # Its record is not on disk: the disk is full, or the folder was removed.
                views.append(own)
            families += item_families(views, self._plan, damaged)
            return "".join(
                family.text(openmetrics=openmetrics)
                for family in families
                if not names or any(name.startswith(family.name.removesuffix("_total")) for name in names)
            )

    def safe_text(self, *, openmetrics: bool = False, names: Sequence[str] = ()) -> str:
        """Return the text, or nothing and a line in the log if it fails: vLLM's own metrics must be served."""
        try:
            found = self.text(openmetrics=openmetrics, names=names)
        except Exception as error:
            reason = reason_of(error)
            if reason != self._failure:
                _LOG.error("vllm-graft: /metrics shows only vLLM's own figures: %s", reason)
            self._failure = reason
            return ""
        self._failure = ""
        return found


def install_metrics(app: FastAPI, plan: Plan) -> None:
    """Add our families to the ``/metrics`` of vLLM's application."""
    from starlette.routing import Route

    exposition = Exposition(plan)

    # Not a coroutine, so that Starlette calls it in a thread.
    def metrics(request: Request) -> Response:
        from prometheus_client.exposition import choose_encoder
        from starlette.responses import Response
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        names = request.query_params.getlist("name[]")
        # With several API servers this is a new registry, which adds up the files of all of them.
        registry = get_prometheus_registry()
        theirs = encode(registry.restricted_registry(names) if names else registry)
        openmetrics = "openmetrics" in content_type
        ours = exposition.safe_text(openmetrics=openmetrics, names=names).encode()
        body = theirs.removesuffix(_END) + ours + (_END if openmetrics else b"")
        headers = {}
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers = gzip.compress(body, compresslevel=1), {"Content-Encoding": "gzip"}
        return Response(body, headers=headers, media_type=content_type)

    # Before vLLM's own, which is mounted on every path that begins with /metrics.
    for path in ("/metrics/", "/metrics"):
        app.router.routes.insert(0, Route(path, metrics, methods=["GET"], include_in_schema=False))


_END: Final = b"# EOF\n"
