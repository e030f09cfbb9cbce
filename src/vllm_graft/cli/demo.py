"""``vllm-graft demo``: the main job on a real server, worth watching.

A stat logger that raises is installed into a stock vLLM server, which then fails every request until it is restarted.
The same server with a small plan puts the logger aside, goes on answering, lets a request ask for a sampler that vLLM
does not have, and proves in each of its processes what is active. Last a burst of requests in five classes under three
schedulers, in virtual time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from vllm_graft.cli.printing import ProgressLine, paint, table
from vllm_graft.cli.status import render
from vllm_graft.errors import SetupError, StartError
from vllm_graft.launcher.models import embedded_model
from vllm_graft.launcher.server import ServerProcess, free_port
from vllm_graft.testing.packages import lay_out, python_path
from vllm_graft.versions import vllm_version

HELP = "run the product's main job on a real vLLM server with the embedded model (about two minutes)"

PLAN = """\
[defaults]
patches = ["stat-logger-guard",         # a stat logger that raises no longer fails every request
           "count-steps", "count-batches"] # two of our own, below
samplers = ["dry"]                      # asked for by a request's own keys; off for all others
stats   = ["request-log"]               # one line of JSON per finished request

[options.request-log]
path = "requests.jsonl"
"""

_OWN = '           "count-steps"'
_SEEDS = '           "cpu-seeds",                 # a request with a seed no longer ends a CPU engine\n'

PATCHES = """\
from vllm_graft import VLLMPatch, wrap

class CountSteps(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"], name="count-steps",
                 processes={"engine"}):
    @wrap
    def schedule(self, *args, **kwargs):
        return self._original_schedule(*args, **kwargs)

class CountBatches(VLLMPatch["vllm.v1.worker.worker_base:WorkerWrapperBase"], name="count-batches",
                   processes={"worker"}):
    @wrap
    def execute_model(self, *args, **kwargs):
        return self._original_execute_model(*args, **kwargs)
"""

FAULTY = '''\
from vllm.v1.metrics.loggers import StatLoggerBase

class Faulty(StatLoggerBase):
    """A stat logger like any team's own, with a bug in it."""

    def __init__(self, vllm_config, engine_index=0): ...
    def log_engine_initialized(self): ...
    def record(self, *args, **kwargs):
        raise RuntimeError("metrics backend unreachable")
'''

QUESTION = "Give me three facts about the Moon."
LOOP = "I am what I am and I am"

_BURST_PLAN: Final = '[defaults]\nscheduler = "priority-fairness"   # a class goes first, but none waits for ever\n'

_LENGTHS: Final = """
[prompt]
mean = 320
sigma = 0.9
min = 8
max = 1500

[output]
mean = 220
sigma = 0.7
min = 8
max = 500
"""

_PHASES: Final = ((25, 26.0), (45, 10.0))  # seconds, and requests per second; the modelled device serves about 17

_SHARES: Final = (10, 20, 40, 20, 10)

_BURST_SCHEDULERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "vLLM, fcfs": ("", ()),
    "vLLM, priority": ("", ("--scheduling-policy", "priority")),
    "priority-fairness": (_BURST_PLAN, ()),
}
"""The schedulers of the burst: name, plan, and arguments of vLLM."""

_CHATS_PLAN: Final = (
    '[defaults]\nattention = "sink-window"   # the first tokens and a window of 4,096; the rest is freed\n'
)
_CHATS: Final = (24, 28_000, 200)  # requests, tokens of each prompt, and tokens of each answer

_CHATS_ARGUMENTS: Final = ("--max-model-len", "32768", "--hf-overrides", '{"max_position_embeddings": 131072}')
_CHATS_HEAD: Final = ("ATTENTION", "FIRST TOKEN, MEAN", "TIME PER TOKEN", "ALL DONE AFTER", "TOKENS/S")

_BURST_HEAD: Final = ("SCHEDULER", "CLASS 1, MEAN", "CLASS 1, P99", "CLASS 5, MEAN", "LONGEST WAIT", "TOKENS/S")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--keep", action="store_true", help="keep the working folder with plan, logs and request log")
    parser.add_argument("--skip-stock", action="store_true", help="leave out the stock server's half")
    parser.add_argument("--skip-burst", action="store_true", help="leave out what is played on modelled devices")


def run(args: argparse.Namespace) -> int:
    """Run both halves and the burst; return 0 if they showed what they should."""
    if vllm_version() is None:
        raise SetupError("vLLM is not installed", where=sys.executable, fix="run `make demo`, which installs it")
    model = embedded_model(ProgressLine())
    folder = Path(tempfile.mkdtemp(prefix="vllm-graft-demo-"))
    with contextlib.ExitStack() as stack:
        if not args.keep:
            stack.callback(shutil.rmtree, folder)
        lay_out(
            folder, "demo-stats", {"vllm.stat_logger_plugins": {"faulty": "demo_stats:Faulty"}}, {"demo_stats": FAULTY}
        )
        own = {"count-steps": "demo_patches:CountSteps", "count-batches": "demo_patches:CountBatches"}
        lay_out(folder, "demo-patches", {"vllm_graft.plugins": own}, {"demo_patches": PATCHES})
        try:
            cpu = "cpu" in metadata.version("vllm")
        except metadata.PackageNotFoundError:
            cpu = True  # only builds for CPUs come under another name
        # The patch for seeds is needed on a CPU build of vLLM alone.
        plan = PLAN.replace(_OWN, _SEEDS + _OWN) if cpu else PLAN
        (folder / "graft.toml").write_text(plan, encoding="utf-8")
        if not args.skip_stock:
            _say("1. Stock vLLM, with a stat logger that raises")
            with _server(model, folder, "stock.log", disable=True) as server:
                print(f"   first chat    -> {_verdict(*_chat(server))}")
                print(f"   second chat   -> {_verdict(*_chat(server))}")
                print(f"   GET /health   -> {_health(server)}")
        _say("2. The same server, the same logger, and this graft.toml")
        print(textwrap.indent(f"{plan}\n{PATCHES}", "   | ", lambda line: True))
        with _server(model, folder, "grafted.log", disable=False) as server:
            healthy = _grafted_half(server, folder)
        if not args.skip_burst:
            healthy &= _burst(folder)
            healthy &= _long_chats(folder)
    if args.keep:
        print(f"kept: {folder}")
    print(paint("The demo did what it says.", "green") if healthy else paint("The demo FAILED.", "red"))
    return 0 if healthy else 1


def _grafted_half(server: ServerProcess, folder: Path) -> bool:
    failed = False
    for which in ("first", "second"):
        status, answer = _chat(server)
        failed |= status != 200
        print(f"   {which} chat".ljust(18) + f"-> {_verdict(status, answer)}")
        if status == 200 and which == "first":
            print(textwrap.indent(textwrap.fill(f"you: {QUESTION}", 100), "      "))
            print(textwrap.indent(textwrap.fill(f"SmolLM2: {answer}", 100), "      "))
    health = server.health()
    print(f"   GET /health   -> {_health(server)}\n")
    _say("3. A prompt that makes the model go round in circles, without and with DRY in the request")
    looping, dry = _continued(server), _continued(server, dry_multiplier=0.8)
    for keys, text in (("", looping), ('"dry_multiplier": 0.8', dry)):
        print(f"   {keys or 'no keys'}:")
        print(textwrap.indent(textwrap.fill(f"{LOOP} ... {text}", 100), "      "))
    print()
    view = server.run_view()
    if view is None:
        raise StartError("the server left no record", where=str(server.log), fix="look at its log")
    _say("4. What is active, said by every process of the server (vllm-graft status)")
    print(textwrap.indent(render([view.as_dict()]), "   "))
    errors = [process.record.last_error for process in view.processes if process.record.last_error]
    print()
    _say("5. What the stat sink wrote (requests.jsonl)")
    time.sleep(0.5)  # the sink writes off the event loop
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = json.loads(line)
        print(f"   {row['request_id']}: {row['generated_tokens']} tokens in {row['total_s']:.1f} s")
    healthy = not failed and health == 200 and bool(errors) and len(lines) == 4 and not view.findings()
    print()
    return healthy and _circles(looping) > 5 > _circles(dry)


def _burst(folder: Path) -> bool:
    _say("6. A burst in five classes on vLLM's real scheduler, in virtual time on a modelled L40S")
    print(textwrap.indent(_BURST_PLAN, "   | "))
    # A burst of half as much again as can be served, then less.
    seconds = sum(length for length, _ in _PHASES)
    parts = [f"[workload]\nseed = 7\nseconds = {seconds}\n{_LENGTHS}"]
    parts += [f"\n[[phase]]\nseconds = {length}\nrate = {rate}\n" for length, rate in _PHASES]
    for number, share in enumerate(_SHARES, 1):
        parts.append(f'\n[[group]]\nname = "P{number}"\nshare = {share}\npriority = {number}\n')
    file = folder / "burst.toml"
    file.write_text("".join(parts), encoding="utf-8")
    print("   playing", end="", flush=True)
    found, rows = {}, []
    for name, (plan, arguments) in _BURST_SCHEDULERS.items():
        print(f" {name} ..", end="", flush=True)
        facts = found[name] = _simulate(folder, file, plan, ("--max-num-seqs", "128", *arguments))
        first, last = (facts["groups"][group]["ttft_s"] for group in ("P1", "P5"))
        served = [f"{first['mean']:.2f} s", f"{first['p99']:.2f} s", f"{last['mean']:.1f} s"]
        rows.append((name, *served, f"{facts['queue_s']['max']:.1f} s", f"{facts['output_tokens_per_s']:,.0f}"))
    print(" done\n" + textwrap.indent(table(_BURST_HEAD, rows), "   ") + "\n")
    # The first class is to be served soon, and no class starved.
    fcfs, strict, ours = found.values()
    fair = ours["queue_s"]["max"] < 0.7 * strict["queue_s"]["max"]
    means = [facts["groups"]["P1"]["ttft_s"]["mean"] for facts in (ours, fcfs)]
    return bool(fair and means[0] < 0.1 * means[1])


def _long_chats(folder: Path) -> bool:
    number, prompt, answer = _CHATS
    _say(f"7. {number} chats of {prompt:,} tokens on vLLM's real KV-cache manager, in virtual time on a modelled L40S")
    print(textwrap.indent(_CHATS_PLAN, "   | "))
    file = folder / "chats.jsonl"
    chat = {"at": 0, "prompt_tokens": prompt, "max_tokens": answer}
    file.write_text("".join(f"{json.dumps(chat)}\n" for _ in range(number)), encoding="utf-8")
    print("   playing", end="", flush=True)
    found, rows = {}, []
    for name, plan in (("full", ""), ("sink-window", _CHATS_PLAN)):
        print(f" {name} ..", end="", flush=True)
        facts = found[name] = _simulate(folder, file, plan, _CHATS_ARGUMENTS)
        times = [f"{facts['ttft_s']['mean']:.1f} s", f"{1000 * facts['tpot_s']['mean']:.0f} ms"]
        rows.append((name, *times, f"{facts['makespan_s']:.1f} s", f"{facts['output_tokens_per_s']:,.0f}"))
    print(" done\n" + textwrap.indent(table(_CHATS_HEAD, rows), "   ") + "\n")
    return bool(found["sink-window"]["makespan_s"] < 0.8 * found["full"]["makespan_s"])


def _simulate(folder: Path, file: Path, plan: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    config = folder / "simulated-plan.toml"
    config.write_text(plan, encoding="utf-8")
    command = [sys.executable, "-m", "vllm_graft.cli", "simulate", "--model", "llama-3-8b", "--device", "L40S"]
    command += ["--speed", "virtual", "--workload", str(file), "--json", *arguments]
    environment = {**os.environ, "GRAFT_CONFIG": str(config), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no word"]
        raise StartError(f"{file.name} could not be played: {said[0]}", where=" ".join(command), fix="run that by hand")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def _chat(server: ServerProcess) -> tuple[int, str]:
    """Chat once through the openai client; return the HTTP status, and the answer or the error."""
    try:
        import openai
    except ImportError as error:
        raise SetupError("the openai client is not installed", fix="pip install 'openai>=2'") from error

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    try:
        answer = client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": QUESTION}], max_tokens=60, temperature=0.0
        )
    except openai.APIStatusError as error:
        return error.status_code, str(error.message)
    except openai.APIConnectionError:
        return 0, "no answer: the server has shut itself down"
    return 200, " ".join((answer.choices[0].message.content or "").split())


def _continued(server: ServerProcess, **keys: object) -> str:
    """Return the model's continuation, with keys at the top level of the request, as with other servers."""
    body = {"model": "smollm2-135m", "prompt": LOOP, "max_tokens": 48, "temperature": 0.0, "ignore_eos": True, **keys}
    status, answer = server.post("/v1/completions", body)
    if status != 200:
        raise StartError(f"the server answered {status}: {answer}", where=str(server.log), fix="look at its log")
    return " ".join(str(json.loads(answer)["choices"][0]["text"]).split())


def _circles(text: str) -> int:
    """Return how often the most frequent sequence of four words comes."""
    words = text.split()
    runs = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    return max((runs.count(each) for each in runs), default=0)


def _health(server: ServerProcess) -> str:
    status = server.health()
    return paint(str(status), "green") if status == 200 else paint(str(status or "no answer"), "red")


def _verdict(status: int, answer: str) -> str:
    if status == 200:
        return paint("200", "green")
    return paint(f"{status or ''} {answer[:90]}".strip(), "red")


@contextlib.contextmanager
def _server(model: Path, folder: Path, log: str, *, disable: bool) -> Iterator[ServerProcess]:
    arguments = [str(model), "--served-model-name", "smollm2-135m", "--dtype", "float32", "--max-model-len", "1024"]
    arguments += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(free_port())]
    environment = {
        "PYTHONPATH": python_path(folder),
        "GRAFT_CONFIG": str(folder / "graft.toml"),
        "GRAFT_DISABLE": "1" if disable else None,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    server = ServerProcess(arguments, env=environment, log=folder / log, cwd=folder)
    print("   starting vLLM", end="", flush=True)
    started, dots = time.monotonic(), 0

    def dot() -> None:
        nonlocal dots
        if time.monotonic() - started >= dots:
            print(".", end="", flush=True)
            dots += 1

    try:
        server.start().wait_healthy(while_waiting=dot)
        print(f" up after {time.monotonic() - started:.0f} s")
        yield server
    finally:
        server.stop()
        left = server.leftovers()
        print(f"   stopped; processes left behind: {len(left)}\n")


def _say(text: str) -> None:
    print(paint(text, "bold"), flush=True)
