"""`vllm-graft simulate`: what it refuses before vLLM is imported, what it hands to vLLM, and the real thing."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_graft import sockets
from vllm_graft.cli import main, simulate
from vllm_graft.cli.simulate import memory_share, model_folder, parallel_sizes, render, summary
from vllm_graft.errors import ConfigError
from vllm_graft.findings import Finding
from vllm_graft.launcher.server import ServerProcess
from vllm_graft.simulator.model_shape import find_model
from vllm_graft.simulator.settings import VARIABLES, SimulationSettings
from vllm_graft.simulator.workload import Result, WorkloadReport
from vllm_graft.testing import Session, free_port, tiny_model, zygote
from vllm_graft.vllm_arguments import VllmArguments

BASE = ["simulate", "--model", "llama-3-8b", "--device", "H200"]
MIXTURE = ["simulate", "--model", "qwen3-30b-a3b", "--device", "L40S"]
LARGE = ["simulate", "--model", "llama-3-70b", "--device", "H100"]
REQUEST = '{"at": 1, "prompt_tokens": 3, "max_tokens": 1}\n'


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GRAFT_CONFIG", "GRAFT_DISABLE", "VLLM_PLUGINS", "VLLM_CUSTOM_PATCHES", *VARIABLES.values()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _nothing_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_play", "_serve"):
            monkeypatch.setattr(simulate, name, lambda *_: pytest.fail("vLLM would have been started"))

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["simulate"], "--model: no model is named. Next: name one"),
            (["simulate", "--model", "llama-3-8b"], "--device: no device is named. Next: name one"),
            (["simulate", "--model", "llama-9b", "--device", "H200"], "nor a shape of that name (did you mean 'llama-"),
            (
                ["simulate", "--model", "list.json", "--device", "H200"],
                "list.json: is not a JSON object but list. Next: ",
            ),
            ([*BASE[:3], "--device", "H2000"], "--device: there is no device 'H2000' (did you mean 'H200'?)"),
            ([*BASE, "--speed", "0"], "--speed: speed must be a number above 0 or 'virtual', but is '0'"),
            (
                [*BASE, "--speed", "virtual"],
                "--speed: virtual time works only in a single process, but a server has several",
            ),
            ([*BASE, "--acceptance", "2"], "--acceptance: acceptance must be a number from 0 to 1, but is '2'"),
            ([*BASE, "--output-tokens", "x"], "--output-tokens: output_tokens must be a number, 0 or more, but is 'x'"),
            ([*BASE, "--json"], "--json: there are no figures without a workload. Next: add --workload FILE"),
            ([*BASE, "--per-request", "x"], "--per-request: there are no figures without a workload"),
            ([*BASE, "--workload", "none.jsonl"], "none.jsonl: the workload cannot be read: No such file"),
            ([*BASE, "--workload", "bad.jsonl"], "bad.jsonl:1: a request lacks 'max_tokens'. Next: add max_tokens"),
            ([*BASE, "--workload", "w", "--per-request", "no/x"], "--per-request: no/x cannot be written"),
            (
                [*BASE, "--workload", "w", "--per-request", "./w"],
                "--per-request: ./w is the workload itself, and would",
            ),
            (
                [*LARGE, "-tp", "1"],
                "--model: the weights of llama-3-70b take 141.1 GB of each of 1 H100, but only 84.2 GB can be used",
            ),
            ([*LARGE, "-tp", "4", "-tp=1"], "take 141.1 GB of each of 1 H100"),
            ([*MIXTURE, "-dp", "1"], "the weights of qwen3-30b-a3b take 61.1 GB of each of 1 L40S"),
            ([*LARGE, "-tp", "2", "--device_memory_utilization", "0.5"], "take 70.6 GB of each of 2 H100, but only 41"),
        ],
    )
    def test_a_mistake_is_one_paragraph_and_status_2(
        self, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ):
        Path("list.json").write_text("[]")
        Path("bad.jsonl").write_text('{"at": 1, "prompt_tokens": 3}\n')
        Path("w").write_text(REQUEST)
        assert main(words) == 2
        shown = capsys.readouterr()
        assert says in shown.err
        assert ". Next: " in shown.err
        assert len(shown.err.splitlines()) == 1
        assert shown.out == ""

    def test_a_disabled_package_simulates_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        monkeypatch.setenv("GRAFT_DISABLE", "1")
        assert main(BASE) == 2
        assert "GRAFT_DISABLE turns the simulated device off too" in capsys.readouterr().err

    def test_a_device_may_be_named_by_the_file_or_a_variable(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ):
        wrong = [*BASE[:3], "--json"]  # a later mistake shows that the device was found
        Path("graft.toml").write_text('[simulated]\ndevice = "instant"\n')
        assert main(wrong) == 2
        assert "there are no figures without a workload" in capsys.readouterr().err
        Path("graft.toml").unlink()
        monkeypatch.setenv("GRAFT_SIMULATE", "0")
        assert main(wrong) == 2
        assert "no device is named" in capsys.readouterr().err
        monkeypatch.setenv("GRAFT_SIMULATE", "Instant")
        assert main(wrong) == 2
        assert "there are no figures without a workload" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "spelling",
        [
            *("--quantization=fp8", "-q fp8", "-qfp8", "--quant fp8", "--quantization-config {}"),
            *("--hf-overrides {}", "--hf_overrides={}", "--hf-overrides.num_hidden_layers 4", "--hf-over {}"),
            *("--hf-config-path elsewhere", "--config tp4.yaml", "--config=tp4.yaml", "--kv_cache_memory_bytes=1"),
        ],
    )
    def test_weights_of_another_size_are_left_to_vllm(self, spelling: str, capsys: pytest.CaptureFixture[str]):
        assert main([*LARGE, *spelling.split(), "--workload", "none"]) == 2
        assert "the workload cannot be read" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "spelling", ["-tp 4", "-tp 1 -tp 4", "--tensor-parallel 4", "-tp4", "-pp2", "--pipeline_parallel_size=2"]
    )
    def test_weights_that_fit_are_not_refused(self, spelling: str, capsys: pytest.CaptureFixture[str]):
        assert main([*LARGE, *spelling.split(), "--workload", "none"]) == 2
        assert "the workload cannot be read" in capsys.readouterr().err

    def test_experts_that_engines_share_fit(self, capsys: pytest.CaptureFixture[str]):
        assert main([*MIXTURE, "-dp", "4", "--workload", "none"]) == 2
        assert "the workload cannot be read" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words",
        [
            *(["-tp", value] for value in ("nan", "inf", "1.5", "two", "", "0", "-1", "1e3", "9" * 400, "9" * 5000)),
            *(["-pp", "nan"], ["-pp", "9" * 400], ["-tp"]),
            *(["--gpu-memory-utilization", value] for value in ("nan", "x", "-1", "0", "9")),
        ],
    )
    def test_a_number_that_is_none_is_left_to_vllm(self, words: list[str], capsys: pytest.CaptureFixture[str]):
        assert main([*LARGE, "--workload", "none", *words]) == 2
        assert "the workload cannot be read" in capsys.readouterr().err
        assert "SimulatedExecutor" not in str(
            simulate._vllm_arguments(find_model("llama-3-8b"), words, tokenizer=False)
        )

    @pytest.mark.parametrize("other", ["w.jsonl", "./w.jsonl", "link.jsonl", "hard.jsonl"])
    def test_a_workload_is_not_overwritten_with_its_figures(self, other: str, capsys: pytest.CaptureFixture[str]):
        Path("w.jsonl").write_text(REQUEST)
        Path("link.jsonl").symlink_to("w.jsonl")
        Path("hard.jsonl").hardlink_to("w.jsonl")
        for names in (("w.jsonl", other), (other, "w.jsonl")):
            assert main([*BASE, "--workload", names[0], "--per-request", names[1]]) == 2
            assert f"--per-request: {names[1]} is the workload itself" in capsys.readouterr().err
        assert Path("w.jsonl").read_text() == REQUEST

    @pytest.mark.parametrize("output", ["out.jsonl", "none.jsonl"])
    def test_a_mistyped_workload_leaves_no_file(self, output: str, capsys: pytest.CaptureFixture[str]):
        assert main([*BASE, "--workload", "none.jsonl", "--per-request", output]) == 2
        assert "none.jsonl: the workload cannot be read: No such file" in capsys.readouterr().err
        assert list(Path().iterdir()) == []

    def test_a_run_that_never_starts_leaves_the_output_as_it_was(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("GRAFT_DISABLE", "1")
        Path("w.jsonl").write_text(REQUEST)
        Path("old.jsonl").write_text("figures")
        for output in ("new.jsonl", "old.jsonl"):
            assert main([*BASE, "--workload", "w.jsonl", "--per-request", output]) == 2
        assert not Path("new.jsonl").exists()
        assert Path("old.jsonl").read_text() == "figures"

    def test_a_published_file_may_leave_things_to_vllms_defaults(self):
        Path("config.json").write_text('{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}')
        assert find_model("config.json").shape is None
        Path("config.json").write_text('{"architectures": ["A"], "model_type": "llama", "num_attention_heads": -1}')
        with pytest.raises(ConfigError):
            find_model("config.json")

    def test_a_value_of_the_file_is_named_by_its_place(self, capsys: pytest.CaptureFixture[str]):
        Path("graft.toml").write_text('[simulated]\ndevice = "H200"\nspeed = -1\n')
        assert main(BASE[:3]) == 2
        assert "graft.toml:3: speed must be a number above 0" in capsys.readouterr().err

    def test_nothing_heavy_is_imported_before_all_of_that_is_known(self):
        program = (
            "import sys\nfrom vllm_graft.cli import main\n"
            "assert main(['simulate', '--list']) == 0\n"
            "assert 'vllm_graft.simulator.workload' not in sys.modules\n"
            "assert main(['simulate', '--model', 'llama-3-70b', '--device', 'L40S']) == 2\n"
            "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "[]"


class TestList:
    def test_it_has_devices_and_shapes(self, capsys: pytest.CaptureFixture[str]):
        Path("graft.toml").write_text('[device.mine]\nbased_on = "H100"\nmemory_gb = 96\n')
        assert main(["simulate", "--list"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^mine +96 GB", shown, re.MULTILINE)
        assert re.search(r"^llama-3-8b +8.0 billion +16.1 GB +32 +128 KiB +8192$", shown, re.MULTILINE)

    def test_as_json(self, capsys: pytest.CaptureFixture[str]):
        assert main(["simulate", "--list", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["name"] for row in rows["devices"]] == ["H200", "H100", "A100", "L40S"]
        assert set(rows["shapes"][0]) == {
            "name",
            "parameters",
            "weight_bytes",
            "layers",
            "kv_bytes_per_token",
            "max_model_len",
        }


class TestArguments:
    def test_a_shape_is_served_under_its_name_with_the_embedded_tokenizer(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("vllm_graft.launcher.models.embedded_model", lambda: Path("/embedded"))
        model = find_model("llama-3-8b")
        assert simulate._vllm_arguments(model, ["--port", "1"], tokenizer=True) == [
            *(str(model.folder), "--served-model-name", "llama-3-8b", "--tokenizer", "/embedded", "--port", "1")
        ]
        own = ["--served-model-name", "x", "--tokenizer=y"]
        assert simulate._vllm_arguments(model, own, tokenizer=True) == [str(model.folder), *own]

    @pytest.mark.parametrize("rest", [["-tp", "2"], ["--tensor_parallel_size=2"], ["--pipeline-parallel-size", "4"]])
    def test_several_devices_are_one_process_unless_another_executor_is_named(self, rest: list[str]):
        model = find_model("llama-3-8b")
        assert "SimulatedExecutor" in simulate._vllm_arguments(model, rest, tokenizer=False)[4]
        own = [*rest, "--distributed-executor-backend", "mp"]
        assert simulate._vllm_arguments(model, own, tokenizer=False)[3:] == own

    def test_a_config_by_another_name_gets_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
        (tmp_path / "mine.json").write_text(find_model("llama-3-8b").file.read_text())
        folder = model_folder(find_model("mine.json"))
        assert json.loads((folder / "config.json").read_text())["hidden_size"] == 4096
        assert model_folder(find_model("llama-3-8b")) == find_model("llama-3-8b").folder

    def test_a_tokenizer_beside_such_a_config_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("GRAFT_CACHE_DIR", str(tmp_path / "cache"))
        (tmp_path / "mine.json").write_text(find_model("llama-3-8b").file.read_text())
        (tmp_path / "tokenizer.json").write_text("{}")
        words = simulate._vllm_arguments(find_model("mine.json"), [], tokenizer=True)
        assert words[words.index("--tokenizer") + 1] == str(tmp_path)

    def test_numbers_are_read_in_every_spelling(self):
        assert parallel_sizes(["--x", "3"]) == (1, 1, 1)
        assert parallel_sizes(["-tp", "2", "--pipeline_parallel_size=3"]) == (2, 3, 1)
        assert parallel_sizes(["-tp", "1", "-pp=4", "--tensor-par", "8"]) == (8, 4, 1)
        assert parallel_sizes(["--data-parallel-size", "4", "-tp", "2"]) == (2, 1, 4)
        assert parallel_sizes(["-tp", "1.5"]) is None
        assert parallel_sizes(["-tp", "65536", "-pp", "65537"]) is None
        assert memory_share([]) == 1
        assert memory_share(["--gpu_memory_utilization=0.3", "--device-memory-utilization", "0.5"]) == 0.5
        assert memory_share(["--gpu-memory-utilization", "nan"]) is None

    def test_another_argument_is_not_taken_for_one(self):
        words = ["--", "-", "--config-format", "hf", "--quantized=1", "x", "-t", "--hf-token", "-p=3"]
        names = ("--config", "--quantization", "-q", "--hf-overrides", "-tp", "-pp")
        assert VllmArguments(tuple(words)).possible_values(*names) == []
        assert VllmArguments(("--config.a=1", "--config")).possible_values("--config") == ["1", ""]

    def test_one_line_says_what_is_simulated(self):
        model, settings = find_model("llama-3-8b"), SimulationSettings(name="H200", speed=20.0, output_tokens=50.0)
        assert summary(model, settings, ["-tp", "2"]) == (
            "simulating llama-3-8b on 2 x H200, 20 times as fast as real time, answers of 50 tokens on average; "
            "its text is invented"
        )


def test_the_report_is_a_readable_table():
    rows = (
        Result("a", "x", 0, 0.0, "done", "length", 10, 5, 0, 0.5, 1.0, 2.0, (1,)),
        Result("b", "y", 0, 0.0, "rejected", "the prompt is too long"),
    )
    shown = render(WorkloadReport(rows, "w.toml", "m", "H200", float("inf"), "0.32.0", modelled_s=2.0, wall_s=0.1))
    assert "m on a modelled H200, vLLM 0.32.0, synchronous scheduling" in shown
    assert "w.toml: 2.0 s modelled in 0.1 s, 20.0 times faster than the time it models" in shown
    assert "2: 1 done, 1 rejected, 0 aborted" in shown
    assert re.search(r"^first token +1.0000 +1.0000", shown, re.MULTILINE)
    assert re.search(r"^y +1 +0 +first token +- ", shown, re.MULTILINE)
    assert re.search(r"^1 +the prompt is too long", shown, re.MULTILINE)


def test_a_report_says_what_was_not_active():
    """By whose figures it is: the scheduler, the plan, and what was put aside."""
    plain = render(WorkloadReport((), "w.toml", "m", "H200", scheduler="vLLM's own, fcfs"))
    assert "scheduler: vLLM's own, fcfs; no plan" in plain
    aside = Finding("S005", "warning", "scheduler fair", "is quarantined: RuntimeError: on purpose")
    report = WorkloadReport((), "w.toml", "m", "H200", plan="abc", scheduler="fair", findings=(aside,))
    shown = render(report)
    assert "scheduler: fair; plan abc" in shown
    assert "S005 warning: scheduler fair: is quarantined: RuntimeError: on purpose" in shown
    assert "not the figures of the plan" in shown
    facts = report.as_dict()
    assert (facts["plan"], facts["scheduler"], facts["sound"]) == ("abc", "fair", False)
    assert facts["findings"] == [aside.as_dict()]
    drifted = Finding("S009", "warning", "patch p", "is drifted: upstream changed")
    assert WorkloadReport((), findings=(drifted,)).sound


QUEUE = """
import heapq
from vllm_graft import AdmissionQueue

class ShortestFirst(AdmissionQueue):
    def __init__(self, options=None):
        super().__init__(options)
        self.heap = []
    def push(self, request):
        heapq.heappush(self.heap, (request.prompt_tokens, request.request_id, request))
    def peek(self):
        return self.heap[0][2]
    def pop(self):
        return heapq.heappop(self.heap)[2]
    def remove(self, request):
        self.heap = [entry for entry in self.heap if entry[1] != request.request_id]
        heapq.heapify(self.heap)
"""


def command(graft: Session, *words: str) -> tuple[list[str], dict[str, str]]:
    """A start of the command, and the environment for it."""
    environment = {name: value for name, value in {**os.environ, **graft.env}.items() if value is not None}
    return [sys.executable, "-m", "vllm_graft.cli", *BASE, *words], environment


def play(graft: Session, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, played to its end."""
    line, environment = command(graft, *words)
    done = zygote.run(line, env=environment, cwd=graft.folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.engine
@pytest.mark.slow
def test_a_planned_scheduler_changes_the_order(graft: Session):
    """The plan is active in a run as in any vLLM; without it, requests go in the order of their arrival."""
    rows = [(0.0, "first", 10), (0.01, "long", 900), (0.02, "middle", 90), (0.03, "short", 9)]
    text = {"at": 0.04, "id": "text", "prompt": "one token per byte", "max_tokens": 40, "ignore_eos": False}
    lines = [
        {"at": at, "id": name, "prompt_tokens": count, "max_tokens": 20, "ignore_eos": True} for at, name, count in rows
    ]
    (graft.folder / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, text]))
    words = ["--speed", "virtual", "--workload", "w.jsonl", "--max-num-seqs", "1", "--max-model-len", "2048"]
    words += ["--per-request", "out.jsonl", "--tokenizer", str(tiny_model()), "--output-tokens", "5"]

    def order() -> list[str]:
        results = [json.loads(line) for line in (graft.folder / "out.jsonl").read_text().splitlines()]
        assert {row["state"] for row in results} == {"done"}
        ended = {row["id"]: row for row in results}["text"]
        assert (ended["reason"], ended["output_tokens"] < 40) == ("stop", True)
        return [row["id"] for row in sorted(results, key=lambda row: row["scheduled_at"])]

    facts = json.loads(play(graft, *words, "--json").stdout)
    assert (facts["speed"], facts["device"], facts["model"]) == ("virtual", "H200", "llama-3-8b")
    assert order() == ["first", "long", "middle", "short", "text"]
    graft.package("acme", {"vllm_graft.plugins": {"shortest-first": "acme:ShortestFirst"}}, {"acme": QUEUE})
    graft.plan('[defaults]\nscheduler = "shortest-first"\n')
    shown = play(graft, *words).stdout
    assert "times faster than the time it models" in shown
    assert "scheduler: shortest-first; plan " in shown
    assert order() == ["first", "short", "text", "middle", "long"]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("speed", ["virtual", "100"])
def test_a_scheduler_that_was_put_aside_fails_the_run(graft: Session, speed: str):
    """The figures are those of vLLM's own order then, whatever process the scheduler ran in."""
    lines = [{"at": n / 100, "prompt_tokens": 10, "max_tokens": 5} for n in range(6)]
    (graft.folder / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    broken = QUEUE.replace(
        "        return heapq.heappop", "        raise RuntimeError('on purpose')\n        return heapq.heappop"
    )
    graft.package("acme", {"vllm_graft.plugins": {"shortest-first": "acme:ShortestFirst"}}, {"acme": broken})
    graft.plan('[defaults]\nscheduler = "shortest-first"\n')
    line, environment = command(graft, "--speed", speed, "--workload", "w.jsonl", "--max-num-seqs", "1", "--json")
    done = zygote.run(line, env=environment, cwd=graft.folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr[-3000:]
    facts = json.loads(done.stdout)
    assert (facts["done"], facts["scheduler"], facts["sound"]) == (6, "shortest-first", False)
    assert len(facts["plan"]) == 12
    assert [finding["code"] for finding in facts["findings"]] == ["S005"]
    assert "on purpose" in facts["findings"][0]["what"]


@pytest.fixture
def scratch(graft: Session) -> Iterator[Path]:
    """The folder for temporary files of what a test starts, near enough to the root for sockets."""
    with tempfile.TemporaryDirectory() as name:
        graft.env |= {"TMPDIR": name, sockets.VARIABLE: None}
        yield Path(name)


def left_in(scratch: Path) -> list[str]:
    """Sockets that are left, and the folders that were made for them."""
    return [each.name for each in scratch.rglob("*") if each.is_socket() or each.name.startswith("vllm-graft-")]


class Playing:
    """A run by the clock on a terminal, in a session of its own."""

    def __init__(self, graft: Session) -> None:
        rows = [{"at": n / 5, "prompt_tokens": 10, "max_tokens": 10} for n in range(3000)]
        (graft.folder / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        line, environment = command(
            graft, "--workload", "w.jsonl", "--speed", "20", "--json", "--max-model-len", "1024"
        )
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            line,
            env=environment,
            cwd=graft.folder,
            stdout=subprocess.PIPE,
            stderr=theirs,
            start_new_session=True,
            # What a shell starts in the background ignores Ctrl-C, and so would everything started from there.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        self.shown = b""

    def until(self, words: bytes) -> None:
        """Wait for words on the terminal."""
        deadline = time.monotonic() + 200
        while words not in self.shown:
            assert time.monotonic() < deadline, self.shown[-3000:]
            self.shown += os.read(self._terminal, 4096)

    def engine(self) -> int:
        """The number of the engine's process."""
        rows = [row.split() for row in members(self.process.pid)]
        (pid,) = (int(row[0]) for row in rows if any("EngineCore" in word for word in row))
        return pid

    def end(self) -> bytes:
        """What was printed, once it has ended; the terminal is read meanwhile, as a person would."""
        threading.Thread(target=self._read, daemon=True).start()
        output, _ = self.process.communicate(timeout=60)
        return output

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone when the last process is
            while True:
                self.shown += os.read(self._terminal, 4096)


@pytest.mark.engine
@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_what_was_measured(graft: Session, scratch: Path):
    """By the clock, with the engine in a process of its own: a bar on the terminal, figures, nothing left behind."""
    run = Playing(graft)
    run.until(b"s modelled [")
    assert len(left_in(scratch)) > 1, "a folder with sockets in it, as long as it runs"
    os.killpg(run.process.pid, signal.SIGINT)
    output = run.end()
    assert run.process.returncode == 130, run.shown[-3000:]
    facts = json.loads(output)
    assert facts["interrupted"]
    assert 0 < facts["done"] < 3000
    assert facts["aborted"] == 3000 - facts["done"]
    assert facts["reasons"] == {"the run ended before it did": facts["aborted"]}
    assert facts["tpot_s"]["p50"] > 0.004
    assert leftovers(run.process.pid) == []
    assert left_in(scratch) == []


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_that_dies_in_the_middle(graft: Session, scratch: Path):
    """An error that says so, and no process is left behind."""
    run = Playing(graft)
    run.until(b"s modelled [")
    os.kill(run.engine(), signal.SIGKILL)
    output = run.end()
    assert run.process.returncode == 2, (output, run.shown[-3000:])
    assert output == b""
    assert b"engine core: the engine died in the middle of the run. Next: see its last messages above" in run.shown
    assert leftovers(run.process.pid) == []
    assert left_in(scratch) == []


@pytest.mark.engine
@pytest.mark.slow
def test_ctrl_c_before_the_engine_is_ready(graft: Session):
    """Nothing was measured, and nothing is left behind; an engine that was ready by then tells that it was stopped."""
    run = Playing(graft)
    deadline = time.monotonic() + 200
    while not any("EngineCore" in row for row in members(run.process.pid)):
        assert time.monotonic() < deadline, run.shown[-3000:]
        time.sleep(0.05)
    os.killpg(run.process.pid, signal.SIGINT)
    printed = run.end()
    assert printed == b"" or json.loads(printed)["interrupted"] is True
    assert run.process.returncode == 130, run.shown[-3000:]
    assert leftovers(run.process.pid) == []


def leftovers(session: int) -> list[str]:
    """The processes of a session that are still there after some seconds."""
    deadline = time.monotonic() + 10
    while (alive := members(session)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive


def members(session: int) -> list[str]:
    """The living processes of a session: number, state and command line."""
    found = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat=,args="], capture_output=True, text=True)
    return [row for row in found.stdout.splitlines() if row.split()[1][0] != "Z"]


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True)
    return [int(row) for row in found.stdout.split()]


@pytest.mark.server
@pytest.mark.slow
def test_a_server_streams_refuses_and_stops(graft: Session, scratch: Path):
    """`simulate` without a workload: two devices in one process, twenty times as fast as real time."""
    before = set(os.listdir("/dev/shm"))
    port = free_port()
    words = ["--speed", "20", "--port", str(port), "--host", "127.0.0.1", "--max-model-len", "2048", "-tp", "2"]
    line, environment = command(graft, *words, "--tokenizer", str(tiny_model()))
    log = graft.folder / "out.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            line, env=environment, cwd=graft.folder, stdout=file, stderr=file, start_new_session=True
        )
        server = ServerProcess(["m", "--port", str(port)])
        try:
            deadline = time.monotonic() + 240
            while server.health() != 200:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.3)
            body = {"model": "llama-3-8b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            status, answer = server.post("/v1/chat/completions", streamed)
            assert status == 200, answer
            assert answer.count("data: {") >= 3, "tokens that come close together share a piece"
            assert '"completion_tokens":20' in answer
            assert answer.rstrip().endswith("data: [DONE]")
            status, answer = server.post("/v1/chat/completions", {**body, "max_tokens": 5000})
            assert status == 400, answer
            status, answer = server.post("/v1/chat/completions", {**body, "messages": "hi"})
            assert status == 400, answer
            (session,) = children(process.pid)
            engines = [row for row in members(session) if "EngineCore" in row or "Worker" in row]
            assert len(engines) == 1, "one process stands for both devices"
            assert len(left_in(scratch)) > 1, "a folder with sockets in it, as long as it runs"
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0, log.read_text()[-3000:]
    said = log.read_text()
    assert "vllm-graft: simulating llama-3-8b on 2 x H200, 20 times as fast as real time" in said
    assert "vllm-graft: the server has stopped" in said
    assert leftovers(session) == []
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("psm_", "sem."))}
    assert left == set(), "shared memory of the server's is left"
    assert left_in(scratch) == []
