"""Blocks that leave a window, on the real scheduler, KV-cache manager and block pool of the installed vLLM.

The scenarios are in retention_driver.py, and run in one process for each plan.
"""

import ast
import json
from dataclasses import replace
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


@pytest.mark.parametrize("ratio", [2, 3, 4, 8])
@pytest.mark.parametrize(("sinks", "last"), [(4, 512), (64, 512), (100, 1000)])
def test_a_window_follows_blocks_that_vllm_makes_larger(ratio: int, sinks: int, last: int):
    """As in models whose layers have different heads: the layers with smaller pages are given larger blocks."""
    torch = pytest.importorskip("torch")
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size

    from vllm_graft.bindings.attention.compaction import WindowShape
    from vllm_graft.bindings.attention.retention import SinkWindowSpec

    of = {"block_size": 16, "head_size": 32, "dtype": torch.float32}
    small = interface.FullAttentionSpec(**of, num_kv_heads=2)
    large = interface.SlidingWindowSpec(**of, num_kv_heads=2 * ratio, sliding_window=100)
    planned = WindowShape.fit(sinks, last, 16)
    specs = {
        "window": SinkWindowSpec.of(small, planned),
        "whole": SinkWindowSpec.of(small, WindowShape.whole(sinks, last, 16), whole=True),
    }
    for name, spec in specs.items():
        found = unify_kv_cache_spec_page_size({"a": spec, "b": large})["a"]
        block, shape = found.block_size, found.shape
        assert block == 16 * ratio
        assert shape.first % block == shape.step % block == 0
        assert found.first_blocks * block >= sinks
        for position in range(3 * last):
            # vLLM's manager frees every whole block before this one.
            freed = max(0, position - found.sliding_window + 1) // block * block
            assert freed <= shape.start(position)
        if name == "whole":
            assert not any(shape.gap(position) for position in range(last))
        else:
            assert shape.before + shape.step <= planned.before + planned.step
        # A kernel may read smaller blocks, by the same window.
        assert found.copy_with_new_block_size(16).shape == shape


def test_a_window_too_small_for_larger_blocks_is_refused():
    torch = pytest.importorskip("torch")
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from vllm_graft.bindings.attention.compaction import WindowShape
    from vllm_graft.bindings.attention.retention import SinkWindowSpec

    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    found = SinkWindowSpec.of(spec, WindowShape.fit(4, 128, 16))
    with pytest.raises(ValueError, match="with KV-cache blocks of 128 tokens it moves by 128 tokens at a time"):
        replace(found, block_size=128)
