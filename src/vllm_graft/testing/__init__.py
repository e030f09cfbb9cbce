"""Tests of plugins and patches: the real engine and the real server, and assertions on their records.

- the fixture ``graft`` (``pytest_plugin.py``, found by pytest on its own): a ``Session`` per test
- ``Session``: writes a plan, then runs a script, an in-process ``LLM`` or a server with it
- ``assert_active``, ``assert_called``: assertions on the processes' records
- ``ServerProcess``: a vLLM server as a child process
- ``embedded_model``, ``tiny_model``: models that need no hub
- ``lay_out``: a distribution with entry points, laid out in a folder instead of installed
"""

from __future__ import annotations

from vllm_graft.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vllm_graft.launcher.models import embedded_model as embedded_model
    from vllm_graft.launcher.models import tiny_model as tiny_model
    from vllm_graft.launcher.server import ServerProcess as ServerProcess
    from vllm_graft.launcher.server import free_port as free_port
    from vllm_graft.testing.packages import lay_out as lay_out
    from vllm_graft.testing.packages import python_path as python_path
    from vllm_graft.testing.session import Session as Session
    from vllm_graft.testing.session import assert_active as assert_active
    from vllm_graft.testing.session import assert_called as assert_called

_HOMES = {
    "ServerProcess": ".launcher.server",
    "Session": "session",
    "assert_active": "session",
    "assert_called": "session",
    "embedded_model": ".launcher.models",
    "free_port": ".launcher.server",
    "lay_out": "packages",
    "python_path": "packages",
    "tiny_model": ".launcher.models",
}

__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
