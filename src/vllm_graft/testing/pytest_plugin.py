"""The pytest plugin: the fixture ``graft`` and the marker ``compiled``. The rest is imported when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_graft.testing.session import Session


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "compiled: needs a vLLM with its compiled code; the matrix of releases has none")


@pytest.fixture
def graft(tmp_path: Path) -> Iterator[Session]:
    """A plan, a state folder and the real engine for one test; see ``vllm_graft.testing.Session``."""
    from vllm_graft.testing.session import Session

    session = Session(tmp_path)
    yield session
    session.close()
