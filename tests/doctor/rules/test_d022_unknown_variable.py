"""D022: VLLM_ variables that vLLM does not know."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import vllm_graft
from vllm_graft.boot.env import OWN
from vllm_graft.doctor.rules import d022_unknown_variable as rule

ENVS = 'environment_variables: dict[str, object] = {"VLLM_PLUGINS": 1, "VLLM_TARGET_DEVICE": 2}\n'


@pytest.fixture
def found(site, tmp_path):
    """What the rule says beside a vLLM that knows two variables."""

    def check(text=ENVS):
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm" / "envs.py").write_text(text)
        return list(rule.check(replace(site.environment(), root=tmp_path / "vllm", vllm="0.32.0")))

    return check


def test_a_name_that_vllm_does_not_know_is_a_warning_with_the_nearest(site, found):
    site.environ["VLLM_PLUGIN"] = "mine"
    (finding,) = found()
    assert (finding.level, finding.subject) == ("warning", "variable VLLM_PLUGIN")
    assert "did you mean 'VLLM_PLUGINS'?" in finding.what
    assert "warns of it and ignores it" in finding.what


def test_it_is_an_error_where_vllm_is_told_to_refuse(site, found):
    site.environ["VLLM_ZEBRA"] = "1"
    site.arguments = ["--fail-on-environ-validation"]
    (finding,) = found()
    assert finding.level == "error"
    assert "refuses to start" in finding.what
    assert "did you mean" not in finding.what


def test_a_variable_that_bears_the_name_of_an_installed_package_is_probably_its_own(site, found):
    site.package("vllm-ascend", {})
    site.environ["VLLM_ASCEND_MODE"] = "1"
    (finding,) = found()
    assert finding.level == "info"
    assert "vllm-ascend may read it" in finding.what


def test_a_variable_that_a_plugin_s_module_names_is_its_own_affair(site, found):
    """It may have told vLLM of it by the time that vLLM looks."""
    text = "def register():\n    environment_variables['VLLM_ZEBRA'] = None\n"
    site.package(
        "mine", {"vllm.general_plugins": {"mine": "graft_doctor_names:register"}}, {"graft_doctor_names": text}
    )
    site.environ["VLLM_ZEBRA"] = "1"
    site.arguments = ["--fail-on-environ-validation"]
    (finding,) = found()
    assert finding.level == "info"
    assert "mine may read it" in finding.what


def test_a_platform_of_another_package_decides_itself_what_it_takes(site, found):
    site.package("other", {"vllm.platform_plugins": {"other": "nowhere:register"}})
    site.environ["VLLM_ZEBRA"] = "1"
    site.arguments = ["--fail-on-environ-validation"]
    (finding,) = found()
    assert finding.level == "warning"


def test_known_names_ours_and_others_are_fine(site, found):
    site.environ.update(
        {"VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CUSTOM_PATCHES": "", "PATH": "", "GRAFT_ZEBRA": "1"}
    )
    assert found() == []


@pytest.mark.parametrize("text", ["", "environment_variables = build()\n", "def broken(:\n"])
def test_a_table_that_cannot_be_read_accuses_nobody(site, found, text):
    site.environ["VLLM_ZEBRA"] = "1"
    assert found(text) == []


def test_the_table_of_the_installed_vllm_is_read(site):
    site.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_KVCACHE_SPAC": "1"})
    (finding,) = site.found("D022")
    assert finding.subject == "variable VLLM_CPU_KVCACHE_SPAC"


def test_a_name_that_is_nearly_ours(site, found):
    """A server with it runs without its plan, and vLLM warns of ``VLLM_`` names alone."""

    site.environ |= {"GRAFT_CONFG": "graft.toml", "GRAFT_SIMULATE": "1", "GRAFT_OF_SOMETHING_ELSE": "1"}
    (finding,) = found()
    assert (finding.level, finding.subject) == ("warning", "variable GRAFT_CONFG")
    assert "did you mean 'GRAFT_CONFIG'?" in finding.what


def test_every_variable_of_ours_is_known():
    """One that is missing from the list would be taken for a misspelling."""
    source = Path(vllm_graft.__file__).parent
    used = {name for file in source.rglob("*.py") for name in re.findall(r'"(GRAFT_[A-Z0-9_]+)"', file.read_text())}
    assert used == {name for name in OWN if name.startswith("GRAFT_")}
