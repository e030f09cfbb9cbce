"""Blocks that leave a window, on the real scheduler, KV-cache manager and block pool of the installed vLLM.

The scenarios are in retention_driver.py, and run in one process for each plan.
"""

import ast
import json
from pathlib import Path

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

DRIVER = Path(__file__).with_name("retention_driver.py")

PLAN = """
[defaults]
attention = "sink-window"
[options.sink-window]
sink_tokens = 20
window = 128
layers = "{layers}"
"""


def scenarios(name: str) -> list[str]:
    """The functions that a tuple of the driver names; the driver itself imports vLLM."""
    for node in ast.parse(DRIVER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:  # type: ignore[attr-defined]
            return [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
    raise LookupError(name)


def play(folder: Path, layers: str, name: str) -> dict[str, str]:
    session = Session(folder)
    try:
        session.plan(PLAN.format(layers=layers))
        session.simulate()
        session.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        text = f"import sys\nsys.path.insert(0, {str(DRIVER.parent)!r})\nimport retention_driver as driver\n"
        done = session.script(text + f"driver.main(MODEL, driver.{name})")
    finally:
        session.close()
    lines = [line for line in done.stdout.splitlines() if line.startswith("SCENARIO ")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(line.removeprefix("SCENARIO ")) for line in lines)


@pytest.fixture(scope="module")
def of_all_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return play(tmp_path_factory.mktemp("all"), "all", "WINDOWS")


@pytest.fixture(scope="module")
def of_some_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return play(tmp_path_factory.mktemp("some"), "0", "MIXED")


@pytest.mark.parametrize("scenario", scenarios("WINDOWS"))
def test_every_layer_has_the_window(of_all_layers: dict[str, str], scenario: str):
    assert of_all_layers[scenario] == "", of_all_layers[scenario]


@pytest.mark.parametrize("scenario", scenarios("MIXED"))
def test_other_layers_have_full_attention(of_some_layers: dict[str, str], scenario: str):
    assert of_some_layers[scenario] == "", of_some_layers[scenario]
