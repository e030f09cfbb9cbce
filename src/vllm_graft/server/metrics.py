"""The queues' figures on the server's own ``/metrics``, read from the engines' boards when somebody asks.

With several API servers vLLM puts ``PROMETHEUS_MULTIPROC_DIR`` into the environment, and each scrape makes a registry
of its own that adds up the files of all of them. Nothing can be registered there beforehand, so a route of ours then
goes before vLLM's: the same registry, and our collector in it. Whichever server is asked reads the same boards, so the
figures show once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_graft.ledger import Boards, Figures, QueueFigures, current
from vllm_graft.ledger.figures import EDGES

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client.metrics_core import Metric
    from starlette.requests import Request
    from starlette.responses import Response

_PREFIX: Final = "vllm_graft_queue_"
_LABELS: Final = ("engine", "by", "value")

_GAUGES: Final[dict[str, str]] = {
    "waiting": "Requests that wait.",
    "running": "Requests that were admitted and have not ended.",
}
_COUNTERS: Final[dict[str, str]] = {
    "admitted": "Requests that were admitted, each once.",
    "refused": "Requests that engine core turned away.",
    "ended": "Requests that ended after they were admitted.",
    "aborted": "Requests that were gone before they were admitted.",
    "tokens": "Tokens that were scheduled, of prompts and answers.",
}


class QueueCollector:
    """Reads the boards of this run; registered like any collector of prometheus_client's."""

    def __init__(self, home: Callable[[], Path | None] = lambda: current().home) -> None:
        self._home = home
        self._boards = Boards(None)
        self._read: Path | None = None

    def collect(self) -> Iterator[Metric]:
        """Every family, each with a sample for each engine and each value of each label."""
        home = self._home()
        if home != self._read:
            self._boards, self._read = Boards(home), home
        return families(self._boards.figures())


def families(queues: Sequence[QueueFigures]) -> Iterator[Metric]:
    """The figures as families of metrics."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    rows = [((str(queue.engine), row.label, row.value), row) for queue in queues for row in queue.rows]
    for kind, described in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, words in described.items():
            family = kind(_PREFIX + name, words, labels=_LABELS)
            for labels, row in rows:
                family.add_metric(labels, getattr(row, name))
            yield family
    shares = GaugeMetricFamily(_PREFIX + "token_share", "Share of the last minute's tokens.", labels=_LABELS)
    for (labels, _), share in zip(rows, [each for queue in queues for each in queue.shares()], strict=True):
        shares.add_metric(labels, share)
    yield shares
    waits = HistogramMetricFamily(_PREFIX + "wait_seconds", "From arrival to the first admission.", labels=_LABELS)
    for labels, row in rows:
        waits.add_metric(labels, _buckets(row), row.wait_sum)
    yield waits


def _buckets(row: Figures) -> list[tuple[str, int]]:
    below, found = 0, []
    for edge, number in zip((*map(str, EDGES), "+Inf"), row.buckets, strict=True):
        below += number
        found.append((edge, below))
    return found


def attach(app: FastAPI) -> None:
    """Have the application's ``/metrics`` show the figures."""
    collector = QueueCollector()
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        _register(collector)
        return
    from starlette.routing import Route

    def metrics(request: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from starlette.responses import Response
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        registry = get_prometheus_registry()
        registry.register(collector)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.router.routes.insert(0, Route("/metrics", metrics, methods=["GET"], include_in_schema=False))


def _register(collector: QueueCollector) -> None:
    from prometheus_client import REGISTRY

    try:
        REGISTRY.register(collector)
    except ValueError:
        # An application was made in this process before; its collector reads the same boards.
        return
