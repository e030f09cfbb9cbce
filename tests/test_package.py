"""The package as a whole: what it exports, what its import costs, and how it behaves without vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import vllm_graft

WITHOUT_VLLM = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
"""


def python(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def test_the_public_names_are_exact():
    """A name appears or goes only on purpose; each has a docstring and is what the tour says."""
    assert vllm_graft.__all__ == [
        "AdmissionQueue",
        "AttentionKernel",
        "ExpertBalancer",
        "Finding",
        "GraftError",
        "KVPolicy",
        "Key",
        "ModelPlugin",
        "MoeRouter",
        "PatchManager",
        "Plan",
        "Sampler",
        "SamplerBase",
        "SamplingStrategy",
        "SchedulerBase",
        "SchedulingPolicy",
        "StatSink",
        "Truncation",
        "VLLMPatch",
        "Window",
        "__version__",
        "add",
        "min_vllm_version",
        "replace",
        "resolve",
        "wrap",
    ]
    for name in vllm_graft.__all__:
        assert getattr(vllm_graft, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    """As for any module."""
    done = python("import vllm_graft; vllm_graft.nothing")
    assert "AttributeError: module 'vllm_graft' has no attribute 'nothing'" in done.stderr


def test_importing_costs_milliseconds_and_pulls_neither_torch_nor_vllm():
    """CPU time of the import itself, the best of a few: at most 20 ms, in every vLLM process of every user."""
    text = """
import sys, time
before = time.process_time_ns()
import vllm_graft
print(time.process_time_ns() - before, "torch" in sys.modules, "vllm" in sys.modules)
"""
    best = None
    for _ in range(5):
        took, torch, vllm = python(text).stdout.split()
        assert (torch, vllm) == ("False", "False")
        best = min(int(took), best or int(took))
    assert best is not None
    assert best <= 20_000_000


def test_what_vllm_loads_pulls_neither_torch_nor_vllm():
    """The entry points and the pytest plugin are as light as the package."""
    done = python(
        "import sys, vllm_graft.boot, vllm_graft.testing.pytest_plugin; assert vllm_graft.boot.platform() is None; "
        "print('torch' in sys.modules, 'vllm' in sys.modules)"
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_commands_work_where_vllm_is_not_installed(tmp_path: Path):
    """plan, points and status need no vLLM; plan says that versions were not checked."""
    for command in (["points"], ["status"], ["points", "--json"]):
        done = python(
            f"{WITHOUT_VLLM}\nfrom vllm_graft.cli import main\nsys.exit(main({command!r}))",
            GRAFT_STATE_DIR=str(tmp_path),
        )
        assert done.returncode == 0, done.stderr
    command = ["plan", "--model", "m", "--additional-config", '{"graft": {"patches": ["stat-logger-guard"]}}']
    done = python(f"{WITHOUT_VLLM}\nfrom vllm_graft.cli import main\nsys.exit(main({command!r}))")
    assert done.returncode == 0, done.stderr
    assert "P001 warning: vLLM: is not installed here" in done.stdout
    done = python(f"{WITHOUT_VLLM}\nfrom vllm_graft.cli import main\nsys.exit(main(['serve']))")
    assert done.returncode == 2
    assert "vLLM is not installed" in done.stderr
