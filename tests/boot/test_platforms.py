"""A platform plugin of another package that fails stops a planned start: vLLM alone would take another platform."""

import subprocess

import pytest

from vllm_graft.testing import Session

pytestmark = pytest.mark.engine

PLUGINS = """
import sys

def says(what):
    print("ASKED", what, file=sys.stderr, flush=True)

def broken():
    says("broken")
    raise OSError("libnpu.so.1:\\n cannot open shared object file")

def absent():
    says("absent")
    return None

def early():
    from vllm.engine.arg_utils import EngineArgs
    return "acme_core.platform.NpuPlatform"
"""

CONFIGURE = """
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
config = EngineArgs(model=MODEL, max_model_len=256).create_engine_config()
print("CONFIGURED", type(current_platform).__name__)
"""

NEXT = "Next: fix or uninstall acme-npu; to go on without it, set VLLM_PLUGINS to a list that has 'graft' but not 'npu'"


def with_plugin(session: Session, target: str) -> Session:
    session.package("acme-npu", {"vllm.platform_plugins": {"npu": target}}, {"acme_npu": PLUGINS})
    return session


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line a failed script said."""
    assert done.returncode != 0, done.stdout[-2000:]
    return done.stderr.strip().splitlines()[-1]


def assert_configured(done: subprocess.CompletedProcess[str], platform: str) -> None:
    """The engine's configuration was made, on this platform."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"CONFIGURED {platform}" in done.stdout


def test_a_plugin_that_raised_stops_the_start(simulated: Session):
    """Named: the plugin, its distribution, the exception in one line, the platform that stepped in, the way on."""
    line = last_line(with_plugin(simulated, "acme_npu:broken").script(CONFIGURE))
    assert (
        "StartError: entry points of vllm.platform_plugins: the platform plugin 'npu' of acme-npu (acme_npu:broken) "
        "raised OSError: libnpu.so.1: cannot open shared object file; vLLM has ignored that and runs on "
        f"SimulatedPlatform. {NEXT}"
    ) in line


@pytest.mark.parametrize(
    ("target", "trouble"),
    [
        ("acme_npu:renamed", "raised AttributeError: module 'acme_npu' has no attribute 'renamed'"),
        ("acme_gone:platform", "raised ModuleNotFoundError: No module named 'acme_gone'"),
        ("acme_npu:early", "offers acme_core.platform.NpuPlatform now, but failed when vLLM asked it"),
    ],
)
def test_so_does_one_that_cannot_be_loaded_or_failed_the_first_time_only(simulated: Session, target: str, trouble: str):
    """vLLM asks in the middle of its own import, where an import that works later may fail."""
    line = last_line(with_plugin(simulated, target).script(CONFIGURE))
    assert f"the platform plugin 'npu' of acme-npu ({target}) {trouble}" in line
    assert NEXT in line


def test_the_way_on_that_it_names_leads_on(simulated: Session):
    """A list without the plugin: vLLM does not ask it, and neither do we."""
    simulated.env["VLLM_PLUGINS"] = "graft"
    done = with_plugin(simulated, "acme_npu:broken").script(CONFIGURE)
    assert_configured(done, "SimulatedPlatform")
    assert "ASKED" not in done.stderr


def test_a_plugin_whose_device_is_absent_is_no_fault(simulated: Session):
    """It answers None, as it should; it is asked once by vLLM and once by us, also for a second engine."""
    done = with_plugin(simulated, "acme_npu:absent").script(CONFIGURE + CONFIGURE)
    assert_configured(done, "SimulatedPlatform")
    assert done.stderr.count("ASKED absent") == 2


def test_without_a_plan_vllm_is_not_disturbed(simulated: Session):
    """The package is merely installed: what vLLM does is vLLM's affair."""
    simulated.plan("")
    done = with_plugin(simulated, "acme_npu:broken").script(CONFIGURE)
    assert_configured(done, "SimulatedPlatform")
    assert done.stderr.count("ASKED broken") == 1


@pytest.mark.compiled
def test_a_server_meant_for_an_accelerator_does_not_end_up_on_a_cpu(planned: Session):
    """The real case: nothing but the CPU is left, and stock vLLM serves on it."""
    script = with_plugin(planned, "acme_npu:broken").script
    assert f"vLLM has ignored that and runs on CpuPlatform. {NEXT}" in last_line(script(CONFIGURE))
    planned.env["GRAFT_DISABLE"] = "1"
    assert_configured(script(CONFIGURE), "CpuPlatform")


@pytest.mark.compiled
def test_an_order_to_run_on_a_cpu_stands_where_vllm_takes_one(planned: Session):
    """Since 0.28 vLLM asks no plugin then, so nothing can have failed; before, the variable orders nothing."""
    planned.env["VLLM_TARGET_DEVICE"] = "cpu"
    done = with_plugin(planned, "acme_npu:broken").script(CONFIGURE)
    if "ASKED" in done.stderr:
        assert NEXT in last_line(done)
    else:
        assert_configured(done, "CpuPlatform")
