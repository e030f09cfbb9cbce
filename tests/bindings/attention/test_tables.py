"""The tables that the binding's Triton kernels write: under Triton's interpreter, where there is no GPU."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiled

CHILD = Path(__file__).with_name("tables_child.py")
CHECKS = re.findall(r"^def (check_\w+)", CHILD.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if find_spec("triton") is None:
        pytest.skip("no Triton here")
    # No zygote: it has imported Triton, whose own functions are then compiled.
    done = subprocess.run([sys.executable, str(CHILD)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_tables_are_those_of_torch(outcomes: dict[str, str], check: str):
    """See the check of this name in the child's module."""
    assert outcomes[check] == "", outcomes[check]
