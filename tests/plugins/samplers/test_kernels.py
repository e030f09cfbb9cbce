"""The Triton kernels do what torch does: under Triton's interpreter, where there is no GPU."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_graft.testing import zygote

CHILD = Path(__file__).with_name("kernels_child.py")
CHECKS = re.findall(r"^def (check_\w+)", CHILD.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes():
    if find_spec("triton") is None:
        pytest.skip("no Triton here")
    done = zygote.run([sys.executable, str(CHILD)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_agree_with_torch(outcomes, check):
    """See the check of this name in the child's module."""
    assert outcomes[check] == "", outcomes[check]


def test_strategies_are_imported_without_torch():
    """The front end imports them for their keys."""
    names = ["dry", "no_repeat_ngram", "top_n_sigma", "xtc"]
    code = "; ".join([f"import vllm_graft.plugins.samplers.{name}" for name in names])
    code += "; import sys; print([name for name in ('torch', 'triton', 'numpy', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
