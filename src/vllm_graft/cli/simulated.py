"""What ``vllm-graft simulate`` prints, and how it reads what is meant for vLLM: no command, but a part of one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.cli.model import ProgressLine
from vllm_graft.cli.table import show_findings, table

if TYPE_CHECKING:
    from vllm_graft.plugins.platforms.simulated.devices import Device
    from vllm_graft.plugins.platforms.simulated.models import Model
    from vllm_graft.plugins.platforms.simulated.settings import Settings
    from vllm_graft.plugins.platforms.simulated.shape import Shape
    from vllm_graft.plugins.platforms.simulated.workload import Report

_TITLES: Final = {"ttft_s": "first token", "tpot_s": "per token after", "e2e_s": "whole request", "queue_s": "queue"}
_DEVICE_HEADS: Final = ("DEVICE", "MEMORY", "BANDWIDTH", "ARITHMETIC", "LINK")
_SHAPE_HEADS: Final = ("SHAPE", "PARAMETERS", "WEIGHTS", "LAYERS", "KV PER TOKEN", "LONGEST")
_SPREAD: Final = ("mean", "p50", "p90", "p99", "max")
_TENSOR: Final = ("--tensor-parallel-size", "-tp")
_PIPELINE: Final = ("--pipeline-parallel-size", "-pp")
_DATA: Final = ("--data-parallel-size", "-dp")
_SHARE: Final = ("--gpu-memory-utilization", "--device-memory-utilization")
_MOST_DEVICES: Final = 1 << 16
"""No model can be spread over more."""


class PlayProgress:
    """The bar of a workload on a terminal, with the modelled time beside it."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._shown = -1

    def __call__(self, done: int, total: int, modelled_s: float) -> None:
        """Redraw where a hundredth more is done."""
        part = 100 * done // total
        if part != self._shown:
            self._shown = part
            self._line(f"{done} of {total} requests, {modelled_s:.1f} s modelled", done, total)


def render(report: Report) -> str:
    """A report for people."""
    facts = report.as_dict()
    parts = [_headline(facts), table(("WHAT", "VALUE"), _counts(facts)), _times(facts)]
    if facts["groups"]:
        parts.append(_groups(facts["groups"]))
    if facts["reasons"]:
        parts.append(table(("REQUESTS", "TURNED AWAY OR CUT OFF BECAUSE"), _reasons(facts["reasons"])))
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


def _reasons(reasons: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(str(count), reason) for reason, count in reasons.items()]


def print_list(*, as_json: bool) -> int:
    """Devices and shapes."""
    from vllm_graft.plugins.platforms.simulated.devices import DEVICES, INSTANT, find
    from vllm_graft.plugins.platforms.simulated.models import find_model, shipped

    own = _own_devices()
    devices = {name: device for name in (*DEVICES, *own) if (device := find(name, own, "graft.toml")) is not None}
    shapes = [
        (model.name, model.config, model.shape) for model in map(find_model, shipped()) if model.shape is not None
    ]
    if as_json:
        rows = {
            "devices": [{"name": name, **asdict(device)} for name, device in devices.items()],
            "shapes": [_shape(*each) for each in shapes],
        }
        print(json.dumps(rows, indent=2))
        return 0
    print(table(_DEVICE_HEADS, [_device_row(name, device) for name, device in devices.items()] + [(INSTANT, *"----")]))
    print()
    print(table(_SHAPE_HEADS, [_shape_row(_shape(*each)) for each in shapes]))
    return 0


def _own_devices() -> dict[str, Any]:
    from vllm_graft.plan.layers import find_file, read_file

    path = find_file()
    return dict(read_file(path).devices) if path is not None else {}


def _device_row(name: str, device: Device) -> tuple[str, ...]:
    return (
        name,
        f"{device.memory_gb:g} GB",
        f"{device.bandwidth_gb_s:g} GB/s",
        f"{device.tflops:g} TFLOP/s",
        f"{device.link_gb_s:g} GB/s",
    )


def _shape(name: str, config: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": shape.parameters,
        "weight_bytes": round(shape.total_bytes),
        "layers": len(shape.layers),
        "kv_bytes_per_token": 2 * shape.kv_width * len(shape.layers),
        "max_model_len": config.get("max_position_embeddings"),
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


def summary(model: Model, settings: Settings, rest: Sequence[str]) -> str:
    """One line that says what is simulated."""
    devices = math.prod(sizes(rest) or (1,))
    count = f"{devices} x " if devices > 1 else ""
    speed = "in real time" if settings.speed == 1 else f"{settings.speed:g} times as fast as real time"
    mean = settings.output_tokens
    ends = f"answers of {mean:g} tokens on average" if mean else "answers end at max_tokens"
    return f"simulating {model.name} on {count}{settings.name}, {speed}, {ends}; its text is invented"


def sizes(rest: Sequence[str]) -> tuple[int, int, int] | None:
    """The tensor, pipeline and data parallel sizes for vLLM; None where one of them is nothing that vLLM would take."""
    try:
        tensor, pipeline, data = (int((given(rest, *names) or ["1"])[-1]) for names in (_TENSOR, _PIPELINE, _DATA))
    except ValueError:
        return None
    fits = all(1 <= size <= _MOST_DEVICES for size in (tensor, pipeline, data))
    return (tensor, pipeline, data) if fits else None


def memory_share(rest: Sequence[str]) -> float | None:
    """The share of a device's memory for vLLM: all of it where none is given, None where vLLM would not take it."""
    try:
        share = float((given(rest, *_SHARE) or ["1"])[-1])
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def given(rest: Sequence[str], *names: str) -> list[str]:
    """The values that an argument for vLLM is given, of which vLLM takes the last.

    Spelled as vLLM allows it: with underscores, cut short, with a key after a dot, the value after a blank or a ``=``.
    It may be glued to a short name too, which vLLM takes of one letter, as in ``-qfp8``, and refuses of ``-tp4``.
    """
    values = []
    for index, word in enumerate(rest):
        value = _value(word, names)
        if value is not None:
            values.append(value or "".join(rest[index + 1 : index + 2]))
    return values


def _value(word: str, names: Sequence[str]) -> str | None:
    """What a word holds of the value of an argument, which may be nothing; None where it is another argument."""
    if word.startswith("--"):
        name, _, value = word.partition("=")
        name = name.partition(".")[0].replace("_", "-")
        return value if len(name) > 2 and any(each.startswith(name) for each in names) else None
    short = next((each for each in names if not each.startswith("--") and word.startswith(each)), None)
    return None if short is None else word.removeprefix(short).removeprefix("=")


def folder_of(model: Model) -> Path:
    """The folder that vLLM is given: where a file has another name than config.json, one with a copy of that name."""
    from vllm_graft.testing.models import cache_folder

    if model.file.name == "config.json":
        return model.folder
    content = model.file.read_bytes()
    folder = cache_folder() / "simulated" / sha256(content).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(content)
    return folder
