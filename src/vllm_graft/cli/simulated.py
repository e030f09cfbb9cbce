"""What ``vllm-graft simulate`` prints, and how it reads what is meant for vLLM: no command, but a part of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.cli.model import ProgressLine
from vllm_graft.cli.table import table
from vllm_graft.errors import ConfigError

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
        f"KV cache of {facts['kv_tokens']} tokens\n{facts['workload']}: {pace}"
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
    tensor, pipeline = (
        int(number(rest, 1, *names))
        for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))
    )
    count = f"{tensor * pipeline} x " if tensor * pipeline > 1 else ""
    speed = "in real time" if settings.speed == 1 else f"{settings.speed:g} times as fast as real time"
    mean = settings.output_tokens
    ends = f"answers of {mean:g} tokens on average" if mean else "answers end at max_tokens"
    return f"simulating {model.name} on {count}{settings.name}, {speed}, {ends}; its text is invented"


def number(rest: Sequence[str], default: float, *names: str) -> float:
    """The number that an argument for vLLM has; the default where it is not given."""
    for index, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") not in names:
            continue
        text = value if equals else (rest[index + 1] if index + 1 < len(rest) else "")
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name} must be a number, and is {text!r}", where=name, fix="correct it") from None
    return default


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
