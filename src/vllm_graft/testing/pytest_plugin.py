"""The pytest plugin: the fixture ``graft``. Importing it costs nothing until a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_graft.testing.session import Session


@pytest.fixture
def graft(tmp_path: Path) -> Iterator[Session]:
    """A plan, a state folder and the real engine for one test; see ``vllm_graft.testing.Session``."""
    from vllm_graft.testing.session import Session

    session = Session(tmp_path)
    yield session
    session.close()
