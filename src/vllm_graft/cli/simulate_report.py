"""The output of ``vllm-graft simulate``: the report of a workload, its progress, and the list of devices and models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.cli.model import ProgressLine
from vllm_graft.cli.table import show_findings, table

if TYPE_CHECKING:
    from vllm_graft.simulator.devices import Device
    from vllm_graft.simulator.model_shape import Model
    from vllm_graft.simulator.workload import WorkloadReport

_TITLES: Final = {"ttft_s": "first token", "tpot_s": "per token after", "e2e_s": "whole request", "queue_s": "queue"}
_DEVICE_HEADS: Final = ("DEVICE", "MEMORY", "BANDWIDTH", "ARITHMETIC", "LINK")
_SHAPE_HEADS: Final = ("SHAPE", "PARAMETERS", "WEIGHTS", "LAYERS", "KV PER TOKEN", "LONGEST")
_SPREAD: Final = ("mean", "p50", "p90", "p99", "max")


class PlayProgress:
    """The progress bar of a workload on a terminal, with the modelled time beside it."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._shown = -1

    def __call__(self, done: int, total: int, modelled_s: float) -> None:
        """Redraw for every percent."""
        part = 100 * done // total
        if part != self._shown:
            self._shown = part
            self._line(f"{done} of {total} requests, {modelled_s:.1f} s modelled", done, total)


def render(report: WorkloadReport) -> str:
    """Render a report for people."""
    facts = report.as_dict()
    parts = [_headline(facts), table(("WHAT", "VALUE"), _counts(facts)), _times(facts)]
    if facts["groups"]:
        parts.append(_groups(facts["groups"]))
    if facts["reasons"]:
        reasons = [(str(count), reason) for reason, count in facts["reasons"].items()]
        parts.append(table(("REQUESTS", "REJECTED OR ABORTED BECAUSE"), reasons))
    if report.findings:
        parts.append(show_findings(report.findings))
    if not report.sound:
        parts.append("These are not the figures of the plan: what is named above was not active until the end.")
    return "\n\n".join(parts)


def _headline(facts: Mapping[str, Any]) -> str:
    state = "interrupted: " if facts["interrupted"] else ""
    pace = f"{facts['modelled_s']:.1f} s modelled in {facts['wall_s']:.1f} s"
    factor = facts["modelled_per_wall"]
    if facts["speed"] == "virtual":
        pace += f", {factor:.1f} times faster than the time it models"
    how = "asynchronous" if facts["async_scheduling"] else "synchronous"
    return (
        f"{state}{facts['model']} on a modelled {facts['device']}, vLLM {facts['vllm']}, {how} scheduling, "
        f"KV cache of {facts['kv_tokens']} tokens\nscheduler: {facts['scheduler']}; "
        f"{'plan ' + facts['plan'] if facts['plan'] else 'no plan'}\n{facts['workload']}: {pace}"
    )


def _counts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    requests = f"{facts['requests']}: {facts['done']} done, {facts['rejected']} rejected, {facts['aborted']} aborted"
    prompt = f"{facts['prompt_tokens']}, {facts['prompt_tokens_per_s']:.1f} per second, {facts['cached_tokens']} cached"
    return [
        ("requests", requests),
        ("makespan", f"{facts['makespan_s']:.3f} s"),
        ("prompt tokens", prompt),
        ("output tokens", f"{facts['output_tokens']}, {facts['output_tokens_per_s']:.1f} per second"),
        ("preemptions", str(facts["preemptions"])),
        (
            "steps",
            f"{facts['steps']}, the device busy for {100 * facts['device_busy_share']:.1f} % of the time"
            + (f" (the first of {facts['engines']} engines)" if facts["engines"] > 1 else ""),
        ),
        ("digest", facts["digest"]),
    ]


def _times(facts: Mapping[str, Any]) -> str:
    rows = [(title, *_spread(facts[name])) for name, title in _TITLES.items()]
    return table(("SECONDS", *(name.upper() for name in _SPREAD)), rows)


def _groups(groups: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (name or "(none)", str(group["requests"]), str(group["done"]), title, *_spread(group[key]))
        for name, group in groups.items()
        for key, title in _TITLES.items()
    ]
    return table(("GROUP", "REQUESTS", "DONE", "SECONDS", *(name.upper() for name in _SPREAD)), rows)


def _spread(values: Mapping[str, float] | None) -> tuple[str, ...]:
    return tuple("-" if values is None else f"{values[name]:.4f}" for name in _SPREAD)


def print_list(*, as_json: bool) -> int:
    """Print the devices, those of ``graft.toml`` included, and the models whose configurations ship."""
    from vllm_graft.plan.layers import find_file, read_file
    from vllm_graft.simulator.devices import DEVICES, INSTANT, find_device
    from vllm_graft.simulator.model_shape import find_model, shipped_models

    path = find_file()
    own = read_file(path).devices if path is not None else {}
    found = {name: find_device(name, own, "graft.toml") for name in (*DEVICES, *own)}
    devices = {name: device for name, device in found.items() if device is not None}
    shapes = [_shape_facts(find_model(name)) for name in shipped_models()]
    if as_json:
        rows = [{"name": name, **asdict(device)} for name, device in devices.items()]
        print(json.dumps({"devices": rows, "shapes": shapes}, indent=2))
        return 0
    print(table(_DEVICE_HEADS, [_device_row(name, device) for name, device in devices.items()] + [(INSTANT, *"----")]))
    print()
    print(table(_SHAPE_HEADS, [_shape_row(shape) for shape in shapes]))
    return 0


def _device_row(name: str, device: Device) -> tuple[str, ...]:
    return (
        name,
        f"{device.memory_gb:g} GB",
        f"{device.bandwidth_gb_s:g} GB/s",
        f"{device.tflops:g} TFLOP/s",
        f"{device.link_gb_s:g} GB/s",
    )


def _shape_facts(model: Model) -> dict[str, Any]:
    shape = model.shape
    assert shape is not None, f"{model.file} ships, and says all that a shape needs"
    return {
        "name": model.name,
        "parameters": shape.parameters,
        "weight_bytes": round(shape.total_bytes),
        "layers": len(shape.layers),
        "kv_bytes_per_token": 2 * shape.kv_width * len(shape.layers),
        "max_model_len": model.config.get("max_position_embeddings"),
    }


def _shape_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        f"{row['parameters'] / 1e9:.1f} billion",
        f"{row['weight_bytes'] / 1e9:.1f} GB",
        str(row["layers"]),
        f"{row['kv_bytes_per_token'] / 1024:.0f} KiB",
        str(row["max_model_len"]),
    )
