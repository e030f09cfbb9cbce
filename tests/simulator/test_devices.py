"""The devices that can be simulated: their tables, and the calibration behind their numbers."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.simulator.devices import DEVICES, find_device
from vllm_graft.simulator.model_shape import read_shape
from vllm_graft.simulator.roofline import Roofline

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIMULATOR_FIGURES = BENCHMARKS.parent / "docs" / "explanation" / "benchmarks" / "simulator.md"


def benchmark(name: str, file: str) -> ModuleType:
    """A benchmark's module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calibration():
    """The benchmark's module, with the recorded steps."""
    return benchmark("calibration", "calibration.py")


class TestCalibration:
    def test_the_shipped_h200_is_within_a_fifth_of_the_measured_one(self, calibration):
        points, about = calibration.recorded("0.32.0", "llama-3-8b")
        assert about["device"] == "NVIDIA H200"
        model = Roofline(read_shape(calibration.SHAPES["llama-3-8b"]), DEVICES["H200"])
        unseen = [point for point in points[1::2] if point.kind == "decode" and point.batch >= 8]
        assert len(unseen) >= 12
        assert {point.batch for point in unseen} == {8, 16, 32, 64, 128, 256}
        assert max(abs(point.error(model)) for point in unseen) < 0.20

    def test_the_shipped_constants_are_the_fitted_ones(self, calibration):
        points, _ = calibration.recorded("0.32.0", "llama-3-8b")
        found = calibration.fit(points[::2], read_shape(calibration.SHAPES["llama-3-8b"]), DEVICES["H200"])
        for name in calibration.FITTED:
            assert getattr(DEVICES["H200"], name) == pytest.approx(getattr(found, name), rel=0.02), name

    def test_the_documentation_shows_the_tables(self, calibration):
        page = SIMULATOR_FIGURES.read_text(encoding="utf-8")
        assert "\n".join(calibration.tables(DEVICES["H200"])) in page

    def test_the_documentation_shows_a_servers_steps(self):
        serving = benchmark("serving", "gpu/serving.py")
        page = SIMULATOR_FIGURES.read_text(encoding="utf-8")
        steps = serving.recorded_steps(BENCHMARKS / "gpu")
        assert "\n".join(serving.step_table(steps)) in page
        for key, value in serving.launches(steps).items():
            assert f"\n{key} = {value} " in page


class TestDevices:
    def test_names_are_found_in_any_case(self):
        assert find_device("h200", {}, "") is DEVICES["H200"]
        assert find_device("Instant", {}, "") is None

    def test_a_device_of_ones_own(self):
        table = {"based_on": ("H100", "g:2"), "memory_gb": (96, "g:3"), "tflops": (1200.5, "g:4")}
        own = find_device("gh200", {"GH200": table}, "")
        assert own is not None
        assert (own.memory_gb, own.tflops, own.bandwidth_gb_s) == (96.0, 1200.5, 3350)

    @pytest.mark.parametrize(
        ("table", "says"),
        [
            ({"memory_gb": (96, "g:3")}, "lacks bandwidth_gb_s, tflops, link_gb_s"),
            ({"based_on": ("H1000", "g:2")}, "must be a device that ships, but is 'H1000'"),
            (
                {"based_on": ("H100", "g:2"), "memroy_gb": (96, "g:3")},
                r"has no key 'memroy_gb' \(did you mean 'memory_gb'\?\)",
            ),
            ({"based_on": ("H100", "g:2"), "tflops": (-1, "g:3")}, "tflops must be a number above 0, but is -1"),
            (
                {"based_on": ("H100", "g:2"), "kv": (1.5, "g:3")},
                "kv must be a number above 0 and at most 1, but is 1.5",
            ),
            ({"based_on": ("H100", "g:2"), "memory_gb": (math.nan, "g:3")}, "memory_gb must be a number above 0"),
            ({"based_on": ("H100", "g:2"), "memory_gb": (math.inf, "g:3")}, "memory_gb must be a number above 0"),
            ({"based_on": ("H100", "g:2"), "link_us": ("x", "g:3")}, "link_us must be a number, 0 or more, but is 'x'"),
        ],
    )
    def test_faults_are_named_with_their_place(self, table, says):
        with pytest.raises(ConfigError, match=says) as caught:
            find_device("mine", {"mine": table}, "GRAFT_SIMULATE")
        assert str(caught.value).startswith("g:")

    def test_an_unknown_device_is_answered_with_the_known_ones(self):
        with pytest.raises(
            ConfigError, match=r"no device 'H20' \(did you mean 'H200'\?\); known are H200, H100, A100, L40S"
        ):
            find_device("H20", {}, "GRAFT_SIMULATE")
