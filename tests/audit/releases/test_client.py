"""How a server is asked: what asking leaves behind in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python has no distutils any more, and pip leaves it alone")
def test_after_pips_session_was_used_setuptools_can_still_be_imported():
    """torch imports it, and stops at an assertion where stdlib's distutils is in its way."""
    code = (
        "from vllm_graft.audit.releases.client import PipClient\n"
        "PipClient()\n"
        "import setuptools, distutils.core\n"
        "assert 'setuptools' in distutils.core.__file__\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
