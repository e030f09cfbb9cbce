"""``vllm-graft simulate``: vLLM's real engine on a device that is modelled, as a server or for one workload."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_graft.cli.printing import ProgressLine, show_findings, table
from vllm_graft.errors import ConfigError
from vllm_graft.files import cache_folder, replace_file
from vllm_graft.switches import disabled
from vllm_graft.vllm_arguments import VllmArguments

if TYPE_CHECKING:
    from vllm_graft.simulator.model_shape import Model
    from vllm_graft.simulator.settings import SimulationSettings
    from vllm_graft.simulator.workload import Workload, WorkloadReport

_KEYS: Final = ("device", "speed", "output_tokens", "acceptance")
"""The settings of a simulation that are arguments of the command."""

_RESIZING: Final = (
    *("--quantization", "-q", "--quantization-config", "--hf-overrides", "--hf-config-path", "--config"),
    "--kv-cache-memory-bytes",
)
"""Arguments of vLLM that change what a device holds, so that the model's file no longer tells."""

_PARALLEL: Final = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)
_MOST_DEVICES: Final = 1 << 16  # no model can be spread over more

_TITLES: Final = {"ttft_s": "first token", "tpot_s": "per token after", "e2e_s": "whole request", "queue_s": "queue"}
_DEVICE_HEADS: Final = ("DEVICE", "MEMORY", "BANDWIDTH", "ARITHMETIC", "LINK")
_SHAPE_HEADS: Final = ("SHAPE", "PARAMETERS", "WEIGHTS", "LAYERS", "KV PER TOKEN", "LONGEST")
_SPREAD: Final = ("mean", "p50", "p90", "p99", "max")

HELP = "run vLLM's real engine on a modelled device: an API server, or one workload and its figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; everything else goes to vLLM."""
    parser.usage = "vllm-graft simulate --model CONFIG --device NAME [options] [any vLLM argument]"
    parser.epilog = (
        "Without --workload this is an OpenAI-compatible server. All other arguments are handed to vLLM, to its server "
        "or to its engine; see `vllm serve --help`."
    )
    add = parser.add_argument
    add("--model", metavar="CONFIG", help="a config.json, a folder that has one, or a shape that ships (see --list)")
    add("--device", metavar="NAME", help="H200, H100, A100, L40S, instant, or a [device.NAME] of graft.toml")
    add(
        "--speed",
        metavar="N",
        help="how fast time passes: 1 for real time (default), 10 for ten times as fast, or virtual",
    )
    add("--output-tokens", metavar="N", help="mean length of an answer (default 0: answers end only at max_tokens)")
    add("--acceptance", metavar="P", help="the share of draft tokens that are right (default 0.7)")
    add("--workload", metavar="FILE", help="play this workload (JSON Lines, or a TOML description) and end")
    add("--per-request", metavar="FILE", help="write one line of JSON for each request of the workload")
    add("--json", action="store_true", help="print the workload's figures, or the list, as JSON")
    add("--list", action="store_true", help="show devices and shapes, and end")
    parser.set_defaults(takes_rest=True)


def run(args: argparse.Namespace) -> int:
    """List, play a workload, or serve."""
    from vllm_graft.cli.serve import check_set_up
    from vllm_graft.simulator.model_shape import find_model

    if args.list:
        return print_list(as_json=args.json)
    from vllm_graft.simulator.workload import read

    if args.model is None:
        raise ConfigError("no model is named", where="--model", fix="name one; `vllm-graft simulate --list` has some")
    model = find_model(args.model)
    variables, settings = _settings(args)
    if args.workload is None and settings.virtual:
        what = "virtual time works only in a single process, but a server has several"
        fix = "give --workload FILE to play a workload, or a number such as --speed 10"
        raise ConfigError(what, where="--speed", fix=fix)
    for name in ("per_request", "json"):
        if args.workload is None and getattr(args, name):
            where = f"--{name.replace('_', '-')}"
            raise ConfigError("there are no figures without a workload", where=where, fix="add --workload FILE")
    _check_memory(model, settings, args.rest)
    workload = read(args.workload) if args.workload is not None else None
    if workload is not None and args.per_request is not None:
        _check_per_request(args.per_request, args.workload)
    if disabled():
        raise ConfigError("GRAFT_DISABLE turns the simulated device off too", where="GRAFT_DISABLE", fix="unset it")
    check_set_up()
    if workload is not None:
        return _play(args, model, variables, workload)
    return _serve(args, model, variables, settings)


def _serve(args: argparse.Namespace, model: Model, variables: dict[str, str], settings: SimulationSettings) -> int:
    from vllm_graft.cli.serve import watch
    from vllm_graft.launcher.server import ServerProcess

    skip = VllmArguments(tuple(args.rest)).given("--skip-tokenizer-init")
    arguments = _vllm_arguments(model, args.rest, tokenizer=not skip)
    print(f"vllm-graft: {summary(model, settings, args.rest)}", file=sys.stderr, flush=True)
    return watch(ServerProcess(arguments, env={"VLLM_NO_USAGE_STATS": "1", **variables}))


def _play(args: argparse.Namespace, model: Model, variables: dict[str, str], workload: Workload) -> int:
    from vllm_graft.simulator.workload import run
    from vllm_graft.simulator.workload.player import parse_engine_args

    # The report goes to standard output, so nothing else may.
    os.environ.update(variables)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # As Ctrl-C: the report of what has been played is printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = _vllm_arguments(model, args.rest, tokenizer=workload.has_text)
    line = ProgressLine()

    def show(done: int, total: int, modelled_s: float) -> None:
        line(f"{done} of {total} requests, {modelled_s:.1f} s modelled", done, total)

    progress = show if sys.stderr.isatty() else None
    report = run(workload, parse_engine_args(["--model", *words]), progress=progress)
    print(json.dumps(report.as_dict(), indent=2) if args.json else render(report), flush=True)
    if args.per_request:
        rows = "".join(json.dumps(result.as_dict()) + "\n" for result in report.results)
        _write(args.per_request, rows, "w")
    if report.interrupted:
        return 130
    return 0 if report.sound else 1


def _settings(args: argparse.Namespace) -> tuple[dict[str, str], SimulationSettings]:
    """Return our arguments as variables, which every process of vLLM sees, and the settings that follow from them.

    An error names the argument at fault rather than its variable.
    """
    from vllm_graft.simulator.settings import VARIABLES, resolve_settings

    variables = {VARIABLES[key]: getattr(args, key) for key in _KEYS if getattr(args, key) is not None}
    # Without --device, a variable or the file may name one; the variable asks for the platform in any case.
    asked = os.environ.get(VARIABLES["device"], "").strip()
    variables.setdefault(VARIABLES["device"], asked if asked.lower() not in ("", "0", "false", "no") else "1")
    try:
        settings = resolve_settings({**os.environ, **variables})
    except ConfigError as error:
        key = next((key for key in _KEYS if VARIABLES[key] == error.where and getattr(args, key) is not None), None)
        where = error.where if key is None else f"--{key.replace('_', '-')}"
        raise ConfigError(error.what, where=where, fix=error.fix) from None
    if not settings.named:
        fix = "name one; `vllm-graft simulate --list` has them, instant is the one whose steps take no time"
        raise ConfigError("no device is named", where="--device", fix=fix)
    return variables, settings


def _check_per_request(file: str, workload: str) -> None:
    """Refuse a file that cannot be written or is the workload's own; leave no empty one behind."""
    same = False
    with contextlib.suppress(OSError):
        # A terminal may be both read and written.
        same = Path(workload).is_file() and Path(workload).samefile(file)
    if same:
        what = f"{file} is the workload itself, and would be overwritten"
        raise ConfigError(what, where="--per-request", fix="name another file")
    new = not os.path.lexists(file)
    _write(file, "", "a")
    if new:
        Path(file).unlink()


def _write(file: str, text: str, mode: str) -> None:
    try:
        with Path(file).open(mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        what = f"{file} cannot be written: {error}"
        raise ConfigError(what, where="--per-request", fix="name another file") from None


def _check_memory(model: Model, settings: SimulationSettings, rest: list[str]) -> None:
    """Refuse weights that cannot fit, before a start that takes a minute; the exact check comes with it."""
    from vllm_graft.simulator.roofline import Roofline

    device, parallel, share = settings.device, parallel_sizes(rest), memory_share(rest)
    if device is None or model.shape is None or settings.kv_bytes:
        return
    if VllmArguments(tuple(rest)).possible_values(*_RESIZING) or parallel is None or share is None:
        return
    tensor, pipeline, data = parallel
    weights = Roofline(model.shape, device, tensor=tensor, pipeline=pipeline, data=data).weight_bytes / 1e9
    usable = share * device.memory_gb - device.reserve_gb
    if weights >= usable:
        devices = f"{math.prod(parallel)} {settings.name}"
        need = f"the weights of {model.name} take {weights:.1f} GB of each of {devices}"
        what = f"{need}, but only {usable:.1f} GB can be used"
        fix = "raise --tensor-parallel-size, or name a device with more memory"
        raise ConfigError(what, where="--model", fix=fix)


def _vllm_arguments(model: Model, rest: list[str], *, tokenizer: bool) -> list[str]:
    """Return the model and the arguments it needs, then the user's own."""
    from vllm_graft.launcher.models import embedded_model
    from vllm_graft.simulator.workload.player import EXECUTOR

    told = VllmArguments(tuple(rest))
    added: list[str] = []
    if model.shipped and not told.given("--served-model-name"):
        added += ["--served-model-name", model.name]
    folder = model_folder(model)
    if tokenizer and not told.given("--tokenizer") and not (model.has_tokenizer and folder == model.folder):
        added += ["--tokenizer", str(model.folder if model.has_tokenizer else embedded_model())]
    tensor, pipeline, _ = parallel_sizes(rest) or (1, 1, 1)
    if tensor * pipeline > 1 and not told.given("--distributed-executor-backend"):
        added += ["--distributed-executor-backend", EXECUTOR]
    return [str(folder), *added, *rest]


def model_folder(model: Model) -> Path:
    """Return the folder for vLLM, which reads a config.json: a file of another name is copied into the cache."""
    if model.file.name == "config.json":
        return model.folder
    content = model.file.read_bytes()
    folder = cache_folder() / "simulated" / sha256(content).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.json", content)
    return folder


def summary(model: Model, settings: SimulationSettings, rest: list[str]) -> str:
    """Return one line that says what is simulated."""
    devices = math.prod(parallel_sizes(rest) or (1,))
    count = f"{devices} x " if devices > 1 else ""
    speed = "in real time" if settings.speed == 1 else f"{settings.speed:g} times as fast as real time"
    mean = settings.output_tokens
    ends = f"answers of {mean:g} tokens on average" if mean else "answers end at max_tokens"
    return f"simulating {model.name} on {count}{settings.name}, {speed}, {ends}; its text is invented"


def parallel_sizes(rest: list[str]) -> tuple[int, int, int] | None:
    """Return the tensor, pipeline and data parallel sizes for vLLM; None if vLLM would refuse one of them."""
    told = VllmArguments(tuple(rest))
    try:
        tensor, pipeline, data = (int((told.possible_values(*names) or ["1"])[-1]) for names in _PARALLEL)
    except ValueError:
        return None
    fits = all(1 <= size <= _MOST_DEVICES for size in (tensor, pipeline, data))
    return (tensor, pipeline, data) if fits else None


def memory_share(rest: list[str]) -> float | None:
    """Return the share of a device's memory for vLLM, 1 if none is given; None if vLLM would refuse it."""
    # vLLM has two names for one argument.
    names = ("--gpu-memory-utilization", "--device-memory-utilization")
    try:
        share = float((VllmArguments(tuple(rest)).possible_values(*names) or ["1"])[-1])
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def render(report: WorkloadReport) -> str:
    """Render a report for people."""
    facts = report.as_dict()
    state = "interrupted: " if facts["interrupted"] else ""
    pace = f"{facts['modelled_s']:.1f} s modelled in {facts['wall_s']:.1f} s"
    if facts["speed"] == "virtual":
        pace += f", {facts['modelled_per_wall']:.1f} times faster than the time it models"
    policy = f"attention: {facts['attention']}; " if facts["attention"] else ""
    how = "asynchronous" if facts["async_scheduling"] else "synchronous"
    headline = (
        f"{state}{facts['model']} on a modelled {facts['device']}, vLLM {facts['vllm']}, {how} scheduling, "
        f"KV cache of {facts['kv_tokens']} tokens\nscheduler: {facts['scheduler']}; {policy}"
        f"{'plan ' + facts['plan'] if facts['plan'] else 'no plan'}\n{facts['workload']}: {pace}"
    )
    columns = [name.upper() for name in _SPREAD]
    times = [(title, *_spread(facts[name])) for name, title in _TITLES.items()]
    parts = [headline, table(("WHAT", "VALUE"), _counts(facts)), table(("SECONDS", *columns), times)]
    if facts["groups"]:
        rows = [
            (name or "(none)", str(group["requests"]), str(group["done"]), title, *_spread(group[key]))
            for name, group in facts["groups"].items()
            for key, title in _TITLES.items()
        ]
        parts.append(table(("GROUP", "REQUESTS", "DONE", "SECONDS", *columns), rows))
    if facts["reasons"]:
        reasons = [(str(count), reason) for reason, count in facts["reasons"].items()]
        parts.append(table(("REQUESTS", "REJECTED OR ABORTED BECAUSE"), reasons))
    if report.findings:
        parts.append(show_findings(report.findings))
    if not report.sound:
        parts.append("These are not the figures of the plan: what is named above was not active until the end.")
    return "\n\n".join(parts)


def _counts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    requests = f"{facts['requests']}: {facts['done']} done, {facts['rejected']} rejected, {facts['aborted']} aborted"
    prompt = f"{facts['prompt_tokens']}, {facts['prompt_tokens_per_s']:.1f} per second, {facts['cached_tokens']} cached"
    steps = f"{facts['steps']}, the device busy for {100 * facts['device_busy_share']:.1f} % of the time"
    if facts["engines"] > 1:
        steps += f" (the first of {facts['engines']} engines)"
    return [
        ("requests", requests),
        ("makespan", f"{facts['makespan_s']:.3f} s"),
        ("prompt tokens", prompt),
        ("output tokens", f"{facts['output_tokens']}, {facts['output_tokens_per_s']:.1f} per second"),
        ("preemptions", str(facts["preemptions"])),
        ("steps", steps),
        ("digest", facts["digest"]),
    ]


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
    shapes: list[dict[str, Any]] = []
    for model in map(find_model, shipped_models()):
        shape = model.shape
        assert shape is not None, f"{model.file} ships, and says all that a shape needs"
        shapes.append(
            {
                "name": model.name,
                "parameters": shape.parameters,
                "weight_bytes": round(shape.total_bytes),
                "layers": len(shape.layers),
                "kv_bytes_per_token": 2 * shape.kv_width * len(shape.layers),
                "max_model_len": model.config.get("max_position_embeddings"),
            }
        )
    if as_json:
        rows = [{"name": name, **asdict(device)} for name, device in devices.items()]
        print(json.dumps({"devices": rows, "shapes": shapes}, indent=2))
        return 0
    device_rows = [
        (name, f"{d.memory_gb:g} GB", f"{d.bandwidth_gb_s:g} GB/s", f"{d.tflops:g} TFLOP/s", f"{d.link_gb_s:g} GB/s")
        for name, d in devices.items()
    ]
    shape_rows = [
        (
            row["name"],
            f"{row['parameters'] / 1e9:.1f} billion",
            f"{row['weight_bytes'] / 1e9:.1f} GB",
            str(row["layers"]),
            f"{row['kv_bytes_per_token'] / 1024:.0f} KiB",
            str(row["max_model_len"]),
        )
        for row in shapes
    ]
    print(table(_DEVICE_HEADS, [*device_rows, (INSTANT, *"----")]))
    print()
    print(table(_SHAPE_HEADS, shape_rows))
    return 0
