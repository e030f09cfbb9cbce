"""D005: what VLLM_PLUGINS switches off."""

import json

import pytest

GRAFT = {
    "vllm.general_plugins": {"graft": "vllm_graft.boot:register"},
    "vllm.platform_plugins": {"graft": "vllm_graft.boot:platform"},
}
RESOLVERS = {
    "vllm.general_plugins": {
        "lora_filesystem_resolver": "vllm.plugins.lora_resolvers.filesystem_resolver:register_filesystem_resolver",
        "lora_hf_hub_resolver": "vllm.plugins.lora_resolvers.hf_hub_resolver:register_hf_hub_resolver",
    }
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_is_not_listed_is_named_for_every_group_that_obeys_the_list(site):
    site.package("on", {"vllm.general_plugins": {"on": "on:register"}})
    site.package(
        "off",
        {
            "vllm.general_plugins": {"off": "off:register"},
            "vllm.stat_logger_plugins": {"stats": "off:Stats"},
            "vllm.logits_processors": {"logits": "off:Logits"},
        },
    )
    site.environ["VLLM_PLUGINS"] = "on"
    (finding,) = site.found("D005")
    assert finding.level == "warning"
    assert "off (off, vllm.general_plugins), stats (off, vllm.stat_logger_plugins)" in finding.what
    assert "logits" not in finding.what
    assert finding.fix == "to have them, set VLLM_PLUGINS=on,off,stats"


def test_no_list_or_one_that_names_all_switches_nothing_off(site):
    site.package("on", {"vllm.general_plugins": {"on": "on:register"}})
    assert site.found("D005") == []
    site.environ["VLLM_PLUGINS"] = "on"
    assert site.found("D005") == []


def test_an_empty_list_switches_everything_off(site):
    site.package("on", {"vllm.general_plugins": {"on": "on:register"}})
    site.environ["VLLM_PLUGINS"] = ""
    assert [finding.level for finding in site.found("D005")] == ["warning"]


def test_names_with_blanks_are_left_to_their_own_rule(site):
    site.package("on", {"vllm.general_plugins": {"on": "on:register", "two": "on:register"}})
    site.environ["VLLM_PLUGINS"] = "on, two"
    assert site.found("D005") == []


def test_vllms_own_resolvers_are_good_to_know(site):
    site.package("vllm", RESOLVERS)
    site.environ["VLLM_PLUGINS"] = ""
    (finding,) = site.found("D005")
    assert finding.level == "info"
    assert "vLLM's own lora_filesystem_resolver, lora_hf_hub_resolver" in finding.what


@pytest.mark.parametrize(
    ("variables", "arguments", "asked"),
    [
        ({"VLLM_CUSTOM_PATCHES": "async-history"}, [], "VLLM_CUSTOM_PATCHES"),
        ({"GRAFT_SIMULATE": "1"}, [], "GRAFT_SIMULATE"),
        ({"GRAFT_CONFIG": "nowhere.toml"}, [], "GRAFT_CONFIG"),
        ({}, ["--additional-config", json.dumps({"graft": {"stats": ["request-log"]}})], "--additional-config"),
    ],
)
def test_a_plan_with_graft_switched_off_is_an_error_that_says_what_asks_for_it(site, variables, arguments, asked):
    site.package("vllm-graft", GRAFT)
    site.environ.update({"VLLM_PLUGINS": "other", **variables})
    site.arguments = arguments
    (finding,) = site.found("D005")
    assert (finding.level, finding.subject) == ("error", "plugin 'graft'")
    assert f"nothing of vllm-graft runs, although {asked} asks it to" in finding.what
    assert "VLLM_PLUGINS=other,graft;" in finding.fix


def test_a_file_in_the_working_directory_is_a_plan(site, tmp_path):
    site.package("vllm-graft", GRAFT)
    (tmp_path / "graft.toml").write_text('[defaults]\nstats = ["request-log"]\n')
    site.environ["VLLM_PLUGINS"] = ""
    (finding,) = site.found("D005")
    assert finding.level == "error"
    assert "graft.toml asks it to" in finding.what


def test_graft_switched_off_with_nothing_planned_is_good_to_know(site):
    site.package("vllm-graft", GRAFT)
    site.environ["VLLM_PLUGINS"] = "other"
    assert [finding.level for finding in site.found("D005")] == ["info"]


def test_graft_disable_makes_it_moot(site):
    site.package("vllm-graft", GRAFT)
    site.environ.update({"VLLM_PLUGINS": "other", "VLLM_CUSTOM_PATCHES": "async-history", "GRAFT_DISABLE": "1"})
    assert site.found("D005") == []
