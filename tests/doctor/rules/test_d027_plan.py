"""D027: a plan that vllm-graft would refuse."""

import json
import os
import sys

import pytest

from vllm_graft.doctor import examine

ITEMS = """
from vllm_graft import StatSink, VLLMPatch
raise RuntimeError("imported")

class Sink(StatSink):
    options = {"path": "x", "count": 3}

class Plain(StatSink): ...

class Unread(StatSink):
    options = dict(path="x")

class Patch(VLLMPatch["vllm.v1.engine.core:EngineCore"], name="mine-patch"): ...
"""


@pytest.fixture(autouse=True)
def _offered(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"sink": "Sink", "plain": "Plain", "unread": "Unread", "mine-patch": "Patch"}
    entries = {name: f"graft_doctor_items:{kind}" for name, kind in names.items()}
    site.package("mine", {"vllm_graft.plugins": entries}, {"graft_doctor_items": ITEMS})


@pytest.fixture
def write(tmp_path):
    return lambda text: (tmp_path / "graft.toml").write_text(text)


def test_a_broken_file_is_an_error_with_file_and_line(site, write):
    write("[defaults]\nstats = [\n")
    (finding,) = site.found("D027")
    assert (finding.level, finding.subject) == ("error", "the plan")
    assert "is not valid TOML" in finding.what
    assert "graft.toml" in finding.where


def test_an_unknown_key_is_told_with_the_nearest(site, write):
    write('[defaults]\nstat = ["sink"]\n')
    (finding,) = site.found("D027")
    assert "did you mean 'stats'?" in finding.what
    assert finding.where == "graft.toml:2"


def test_every_name_that_nothing_registers_is_told_not_only_the_first(site, write):
    write('[defaults]\nstats = ["snk", "request-log"]\n[[profile]]\nmodel = "*70B*"\npatches = ["gone"]\n')
    snk, gone = site.found("D027")
    assert "there is no item 'snk' (did you mean 'sink'?)" in snk.what
    assert (snk.where, gone.where) == ("graft.toml:2", "graft.toml:5")


def test_with_a_model_only_the_profiles_that_match_it_count(site, write):
    write('[[profile]]\nmodel = "*70B*"\npatches = ["gone"]\n')
    site.arguments = ["org/model-7B", "--served-model-name", "small"]
    assert site.found("D027") == []
    site.arguments = ["--model", "org/model-70B"]
    assert len(site.found("D027")) == 1
    site.arguments = ["serve", "org/model", "--served-model-name", "small", "big-70B"]
    assert len(site.found("D027")) == 1


def test_where_a_file_of_vllm_s_own_may_name_the_model_only_the_defaults_are_sure_to_count(site, write):
    write('[defaults]\nstats = ["snk"]\n[[profile]]\nmodel = "*70B*"\npatches = ["gone"]\n')
    site.arguments = ["--config", "server.yaml"]
    (finding,) = site.found("D027")
    assert "'snk'" in finding.what


def test_with_a_model_profiles_that_contradict_one_another_are_told(site, write):
    write('[[profile]]\nmodel = "*"\non_failure = "warn"\n[[profile]]\nmodel = "*7B"\non_failure = "stop"\n')
    assert site.found("D027") == []
    site.arguments = ["org/model-7B"]
    (finding,) = site.found("D027")
    assert "disagree on `on_failure`" in finding.what


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("[options.sink]\npth = 'y'", "'sink' has no option 'pth' (did you mean 'path'?)"),
        ("[options.sink]\ncount = 'y'", "the option 'count' of 'sink' must be a whole number"),
        ("[options.plain]\nany = 1", "'plain' has no option 'any'"),
        ("[options.request-log]\npth = 'y'", "'request-log' has no option 'pth'"),
        ("[options.snk]\npath = 'y'", "options are given for 'snk', but there is no such item"),
    ],
)
def test_options_are_checked_against_what_the_source_declares(site, write, options, what):
    write(f'[defaults]\nstats = ["sink", "plain", "unread", "request-log"]\n{options}\n')
    (finding,) = site.found("D027")
    assert what in finding.what
    assert finding.where == "graft.toml:4"


def test_options_that_cannot_be_read_are_believed(site, write):
    write('[defaults]\nstats = ["unread"]\n[options.unread]\nanything = 1\n')
    assert site.found("D027") == []


def test_keys_that_requests_have_by_default_are_believed(site, write):
    write('[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = {dry_multiplier = 0.8}\n')
    assert site.found("D027") == []
    write('[defaults]\nsamplers = ["dry"]\n[options.dry]\ndefaults = 0.8\n')
    (finding,) = site.found("D027")
    assert (
        finding.what
        == "the option 'defaults' of 'dry' cannot be what requests carry: it must be a table of keys, but is 0.8"
    )


def test_an_item_under_the_key_of_another_point_is_told(site, write):
    write('[defaults]\nstats = ["mine-patch"]\npatches = ["sink"]\n')
    first, second = site.found("D027")
    assert "is not an item of the stats point" in first.what
    assert "is not an item of the patch point" in second.what


def test_a_point_that_is_not_bound_is_told(site, write):
    write('[defaults]\nio_processor = "sink"\n')
    (finding,) = site.found("D027")
    assert "cannot be planned" in finding.what


def test_the_variable_and_the_argument_are_checked_and_replace_what_the_file_says(site, write):
    write('[defaults]\npatches = ["gone-1"]\nstats = ["gone-2"]\n')
    site.environ["VLLM_CUSTOM_PATCHES"] = "gone-3"
    site.arguments = ["--additional-config", json.dumps({"graft": {"stats": ["gone-4"]}})]
    places = {finding.where: finding.what for finding in site.found("D027")}
    assert set(places) == {"VLLM_CUSTOM_PATCHES", "--additional-config graft.stats"}
    assert "gone-3" in places["VLLM_CUSTOM_PATCHES"]


@pytest.mark.parametrize("text", ["{graft: 1}", "[" * 50_000])
def test_additional_config_that_is_no_json_is_told(site, text):
    site.arguments = ["--additional-config", text]
    (finding,) = site.found("D027")
    assert (finding.where, finding.what.startswith("is not JSON: ")) == ("--additional-config", True)


def test_a_file_that_the_variable_names_and_that_is_not_there_is_told(site):
    site.environ["GRAFT_CONFIG"] = "nowhere.toml"
    (finding,) = site.found("D027")
    assert finding.where == "GRAFT_CONFIG"


def test_a_sound_plan_is_silent_and_imports_nothing_of_it(site, write):
    write('[defaults]\nstats = ["*"]\npatches = ["async-history"]\n[options.sink]\npath = "y"\n')
    before = dict(os.environ)
    assert examine(site.environment()) == []
    assert "graft_doctor_items" not in sys.modules
    assert dict(os.environ) == before


def test_no_plan_and_a_disabled_one_have_no_faults(site, write):
    assert site.found("D027") == []
    write("[defaults\n")
    site.environ["GRAFT_DISABLE"] = "1"
    assert site.found("D027") == []


def test_a_patch_that_a_general_plugin_may_register_is_no_error(site):
    """Only a start can tell, so it is a warning; without such a plugin nobody could register it."""
    site.environ["VLLM_CUSTOM_PATCHES"] = "PriorityScheduler"
    (finding,) = site.found("D027")
    assert "there is no item 'PriorityScheduler'" in finding.what
    site.package(
        "seeds", {"vllm.general_plugins": {"custom": "seed_plugin:register"}}, {"seed_plugin": "def register(): ..."}
    )
    assert site.found("D027") == []
    (finding,) = site.found("P009")
    assert (finding.level, finding.subject) == ("warning", "patch PriorityScheduler")
    assert "custom of seeds" in finding.what
