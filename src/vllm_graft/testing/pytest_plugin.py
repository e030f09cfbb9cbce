"""The pytest plugin: the fixture ``graft``, the markers ``compiled`` and ``plain_start``, and the zygote.

The rest of the package is imported when a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_graft.testing.session import Session


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``graft_zygote``."""
    parser.addini("graft_zygote", "fork vLLM's processes from one that has imported its dependencies", type="bool")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and set the zygote up if the project wants it."""
    config.addinivalue_line("markers", "compiled: needs a vLLM with its compiled code; the matrix of releases has none")
    config.addinivalue_line("markers", "plain_start: starts processes by exec, not by a fork of the zygote")
    if config.getini("graft_zygote"):
        from vllm_graft.testing import zygote

        zygote.enable(dict(os.environ))


def pytest_unconfigure() -> None:
    """Stop the zygote."""
    from vllm_graft.testing import zygote

    zygote.disable()


@pytest.fixture(autouse=True)
def _plain_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep tests with the marker ``plain_start`` away from the zygote."""
    if request.node.get_closest_marker("plain_start") is None:
        yield
        return
    from vllm_graft.testing import zygote

    with zygote.suspended():
        yield


@pytest.fixture
def graft(tmp_path: Path) -> Iterator[Session]:
    """A plan, a state folder and the real engine for one test; see ``vllm_graft.testing.Session``."""
    from vllm_graft.testing.session import Session

    session = Session(tmp_path)
    yield session
    session.close()
