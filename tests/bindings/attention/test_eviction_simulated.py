"""Policies that evict blocks one by one, on the real scheduler and block pool of the installed vLLM.

The scenarios are in eviction_driver.py, and run in one process.
"""

import ast
import json
from pathlib import Path

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

DRIVER = Path(__file__).with_name("eviction_driver.py")


def scenarios() -> list[str]:
    """The functions that the driver lists; the driver itself imports vLLM."""
    for node in ast.parse(DRIVER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "SCENARIOS":  # type: ignore[attr-defined]
            return [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
    raise LookupError("SCENARIOS")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    session = Session(tmp_path_factory.mktemp("evicting"))
    try:
        modules = {"eviction_driver": DRIVER.read_text(encoding="utf-8")}
        session.package("behaving", {"vllm_graft.plugins": {"behaving": "eviction_driver:Behaving"}}, modules)
        session.plan('[defaults]\nattention = "behaving"\n')
        session.simulate()
        session.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = session.script("import eviction_driver as driver\ndriver.main(MODEL, driver.SCENARIOS)")
    finally:
        session.close()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("SCENARIO ")]
    return dict(json.loads(line.removeprefix("SCENARIO ")) for line in lines)


@pytest.mark.parametrize("scenario", scenarios())
def test_blocks_are_evicted(played: dict[str, str], scenario: str):
    assert played[scenario] == "", played[scenario]
