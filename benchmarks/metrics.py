"""What a scrape of ``/metrics`` costs with 1,000 tenants: our lines, and the same lines by prometheus_client.

    python benchmarks/metrics.py

Prints milliseconds of CPU time: of the first scrape, of one after a tenth of the tenants changed, of one after nothing
changed, and of prometheus_client writing as many samples.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from vllm_graft.ledger import LabelStatistics, Ledger
from vllm_graft.ledger.record import Record
from vllm_graft.plan import Plan, PlanItem
from vllm_graft.server.metrics import Exposition

TENANTS = 1000
ROUNDS = 5
PLAN = Plan((PlanItem("scheduler", "tenant-fairness", "m:Q", "p", ("engine",)),), model="m")


class Samples:
    """As many samples as a thousand tenants have, as a collector of prometheus_client's gives them."""

    def collect(self):
        for index in range(2):
            family = GaugeMetricFamily(f"gauge_{index}", "words", labels=("engine", "by", "value"))
            for tenant in range(TENANTS):
                family.add_metric(("0", "tenant", f"tenant-{tenant}"), tenant)
            yield family
        for index in range(6):
            counter = CounterMetricFamily(f"counter_{index}", "words", labels=("engine", "by", "value"))
            for tenant in range(TENANTS):
                counter.add_metric(("0", "tenant", f"tenant-{tenant}"), tenant)
            yield counter
        waits = HistogramMetricFamily("waits", "words", labels=("engine", "by", "value"))
        edges = [*(str(edge) for edge in range(10)), "+Inf"]
        for tenant in range(TENANTS):
            waits.add_metric(("0", "tenant", f"tenant-{tenant}"), [(edge, 1) for edge in edges], 1.0)
        yield waits


def took_ms(call: Callable[[], object]) -> float:
    """Milliseconds of CPU time of one call."""
    began = time.process_time()
    call()
    return 1000 * (time.process_time() - began)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRAFT_STATE_DIR"] = folder
        ledger = Ledger()
        ledger.begin_run("run", PLAN)
        ledger.set_item("scheduler", "tenant-fairness", "applied")
        ledger.open(Record.of_this_process("run", PLAN.hash, "m", ["frontend", "engine"], "0.32.0", "V1"))
        board = ledger.queue_statistics("tenant-fairness")

        def change(every: int, number: int) -> None:
            for index in range(0, TENANTS, every):
                row = LabelStatistics("tenant", f"tenant-{index}", waiting=number, tokens=100 * number)
                row.add_wait(0.2)
                board.write(index, row)

        change(1, 1)
        exposition = Exposition(PLAN, lambda: ledger)
        first = took_ms(exposition.text)
        tenth, same = [], []
        for number in range(ROUNDS):
            change(10, number + 2)
            tenth.append(took_ms(exposition.text))
            same.append(took_ms(exposition.text))
        lines = exposition.text().count("\n")
        ledger.close()
    registry = CollectorRegistry()
    registry.register(Samples())
    theirs = min(took_ms(lambda: generate_latest(registry)) for _ in range(ROUNDS))
    print(f"{TENANTS} tenants, {lines} lines; milliseconds of CPU time of a scrape")
    print(f"  the first                      {first:7.1f}")
    print(f"  a tenth of the tenants changed {min(tenth):7.1f}")
    print(f"  nothing changed                {min(same):7.1f}")
    print(f"  the same by prometheus_client  {theirs:7.1f}")


if __name__ == "__main__":
    main()
