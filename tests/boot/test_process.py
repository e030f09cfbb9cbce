"""What a process decides for itself, without an engine: roles, joint states, patches applied by hand before us."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_graft.boot import start
from vllm_graft.boot.process import _joint_state
from vllm_graft.errors import StartError
from vllm_graft.patching import HookState


def hook(target: str, state: str = "applied", reason: str = "") -> HookState:
    return HookState("p", target, "method", "wrap", state, reason, 0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "runner", "state"),
    [
        ("vllm.v1.sample.sampler:Sampler", "V2", "dead"),
        ("vllm.v1.sample.sampler:Sampler", "V1", "applied"),
        ("vllm.v1.worker.gpu.sample.sampler:Sampler", "V1", "dead"),
        ("vllm.v1.worker.gpu.sample.sampler:Sampler", "V2", "applied"),
        ("vllm.v1.sample.sampler:Sampler", "", "applied"),
        ("vllm.v1.core.sched.scheduler:Scheduler", "V2", "applied"),
    ],
)
def test_a_patch_of_the_other_model_runner_is_dead(target: str, runner: str, state: str):
    """It applies, its fingerprint would fit, and nothing ever calls it: the runner decides."""
    found, reason = _joint_state([hook(target)], runner)
    assert found == state
    assert bool(reason) == (state == "dead")


def test_the_worst_hook_of_a_patch_counts():
    """Refused before late, late before dead, dead before armed."""
    fine, armed = hook("m:A"), hook("m:A", "armed", "waits")
    late, refused = hook("m:A", "late", "runs already"), hook("m:A", "refused", "gone")
    dead = hook("vllm.v1.sample.sampler:Sampler")
    assert _joint_state([fine], "V2") == ("applied", "")
    assert _joint_state([fine, armed], "V2") == ("armed", "waits")
    assert _joint_state([fine, armed, dead], "V2")[0] == "dead"
    assert _joint_state([fine, dead, late], "V2") == ("late", "runs already")
    assert _joint_state([late, refused], "V2") == ("refused", "gone")


def test_an_engine_does_not_repeat_why_nothing_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The front end has said so; a configuration built by hand for a planned model is still refused."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=""),
        model_config=SimpleNamespace(model="org/Model-7B", served_model_name=None),
        additional_config={},
    )
    monkeypatch.chdir(tmp_path)
    Path("graft.toml").write_text('[[profile]]\nmodel = "*70B*"\nstats = ["request-log"]\n')
    with caplog.at_level("INFO", logger="vllm.graft"):
        start.refuse_config_by_hand(config, None)
    assert caplog.text == ""
    config.model_config.model = "org/Model-70B"
    with pytest.raises(StartError, match="VllmConfig was built by hand, so its plan \\(request-log\\)"):
        start.refuse_config_by_hand(config, None)


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)


BY_HAND = """
import json.decoder
from vllm_graft import VLLMPatch, wrap
class ByHand(VLLMPatch[json.decoder.JSONDecoder], name="by-hand"):
    @wrap
    def decode(self, *args, **kwargs):
        return self._original_decode(*args, **kwargs)
ByHand.apply()
"""


def test_a_patch_applied_by_hand_before_us_is_left_alone():
    """A package in the style of the seeds may be loaded before ours, in a server that plans nothing."""
    done = run(
        BY_HAND
        + "from vllm_graft.boot.process import process\nimport json\njson.loads('1')\n"
        + "print([(hook.patch, hook.hits) for hook in process.engine.report()])"
    )
    assert done.stdout.strip() == "[('by-hand', 1)]", done.stderr


def test_a_patch_by_hand_that_does_not_fit_its_module_still_fails_the_import():
    """Nobody planned it, so nobody has allowed it to be absent."""
    done = run(
        "from vllm_graft import VLLMPatch, replace\nfrom vllm_graft.boot.process import process\n"
        "class Wrong(VLLMPatch['colorsys'], name='wrong'):\n"
        "    @staticmethod\n    @replace\n    def no_such_function():\n        return 1\n"
        "Wrong.apply()\nimport colorsys"
    )
    assert "TargetError" in done.stderr
    assert "no_such_function" in done.stderr
