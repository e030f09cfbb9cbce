"""What was measured by the clock beside the same in virtual time: ratios, which alone can be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scheduling.figures import LONG_S, Row, capacity_of, row_of
from benchmarks.scheduling.machines import KINDS, Kind
from benchmarks.scheduling.play import Machine, play
from benchmarks.scheduling.policies import policy_of
from benchmarks.scheduling.workloads import ENGINE, cycle, saturated

from vllm_graft.errors import ConfigError
from vllm_graft.simulator.devices import DEVICES

COLUMNS = (
    *("policy", "", "P1 mean", "P1 P99", "longest wait", "over M", "tokens/s", "preempted", "failed"),
    *("P1 mean/fcfs", "P1 P99/fcfs", "P1 mean/priority", "longest/fcfs", "longest/priority", "tokens/fcfs"),
)


def report(file: Path) -> None:
    """Print the comparison; what is simulated for it is kept in the file."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        names = [run["policy"] for run in record["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("is no record of a run", where=str(file), fix="make one with --out") from error
    if "simulated" not in record:
        record["simulated"] = simulated(record, names)
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join([*_about(record), ""]))
    _table([row for pair in _pairs(record) for row in pair])


def simulated(record: Row, names: Sequence[str]) -> Row:
    """The same cycle on the simulated device, in virtual time."""
    kind = KINDS[record["kind"]]
    machine = Machine(kind.device, "", {**record["engine"], "model": ENGINE["model"]})
    capacity, slower = _capacity(kind, machine), 1.0
    if kind.slowed:
        slower = capacity / record["capacity"]
        machine = Machine("slowed", _slowed(kind.device, slower), machine.engine)
        capacity = _capacity(kind, machine)
    scale, rows = record["cycle_scale"], []
    for number, name in enumerate(names, 1):
        print(f"simulating {number} of {len(names)}: {name}", file=sys.stderr, flush=True)
        policy = policy_of(name).waiting_at_most(LONG_S * scale)
        load = cycle(capacity, record["seed"], scale, kind.lengths)
        [played] = play(policy, [("cycle", load)], machine)
        rows.append(row_of("cycle", name, record["seed"], played.results, played.preemptions, LONG_S * scale))
    return {"device": kind.device, "slower": round(slower, 3), "capacity": capacity, "rows": rows}


def _capacity(kind: Kind, machine: Machine) -> float:
    [played] = play(policy_of("fcfs"), [("saturated", saturated(kind.saturated, kind.lengths))], machine)
    return capacity_of(played.results)


def _slowed(name: str, factor: float) -> str:
    """A device on which every step takes that many times as long."""
    device = DEVICES[name]
    return (
        f'[device.slowed]\nbased_on = "{name}"\nbandwidth_gb_s = {device.bandwidth_gb_s / factor}\n'
        f"tflops = {device.tflops / factor}\nlayer_us = {device.layer_us * factor}\n"
        f"request_us = {device.request_us * factor}\n"
    )


def _about(record: Row) -> Iterator[str]:
    scale, first, model = record["cycle_scale"], record["runs"][0], record["model"]
    yield (
        f"One cycle, {45 * scale:g} s at 1.5 times and {105 * scale:g} s at 0.65 times what can be served; "
        f"M = {LONG_S * scale:g} s; {first['requests']} requests, seed {record['seed']}."
    )
    yield (
        f"Real: {model} on {first['device']}, vLLM {first['vllm']}, {record['engine']['max_num_seqs']} at a time, "
        f"{record['capacity']:.2f} requests per second at most; measured again in each process: "
        + ", ".join("{:.2f} (load {} to {})".format(run["capacity_here"], *run["load"]) for run in record["runs"])
        + "."
    )
    found = record["simulated"]
    slow = f", every step {found['slower']:g} times as long so that it serves as many" if found["slower"] != 1 else ""
    yield (
        f"Simulated: {ENGINE['model']} on {found['device']}{slow}; {found['capacity']:.2f} requests per second at "
        f"most, {found['rows'][0]['requests']} requests at the same multiples of that. Compare ratios, not times."
    )


def _pairs(record: Row) -> Iterator[list[list[str]]]:
    real = {run["policy"]: run for run in record["runs"]}
    model = {row["policy"]: row for row in record["simulated"]["rows"]}
    for name in real:
        yield [[name, "real", *_cells(real[name], real)], ["", "simulated", *_cells(model[name], model)]]


def _cells(row: Row, rows: dict[str, Row]) -> list[str]:
    plain = [f"{row['p1_mean_ms'] / 1000:.2f} s", f"{row['p1_p99_ms'] / 1000:.2f} s", f"{row['max_wait_s']:.1f} s"]
    counts = [row["over_30_s"], round(row["tokens_per_s"]), row["preemptions"], row["shed"]]
    keys = [("p1_mean_ms", "fcfs"), ("p1_p99_ms", "fcfs"), ("p1_mean_ms", "priority"), ("max_wait_s", "fcfs")]
    keys += [("max_wait_s", "priority"), ("tokens_per_s", "fcfs")]
    ratios = [f"{row[key] / rows[other][key]:.3f}" if other in rows else "-" for key, other in keys]
    return [*plain, *(f"{count:,}" for count in counts), *ratios]


def _table(rows: list[list[Any]]) -> None:
    lines = [list(COLUMNS), *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
