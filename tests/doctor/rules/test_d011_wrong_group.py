"""D011: groups that are never read."""

import pytest


@pytest.mark.parametrize(
    ("group", "meant"),
    [
        ("vllm.general_plugin", "vllm.general_plugins"),
        ("vllm_general_plugins", "vllm.general_plugins"),
        ("vllm.general-plugins", "vllm.general_plugins"),
        ("VLLM.general_plugins", "vllm.general_plugins"),
        ("vllm.general", "vllm.general_plugins"),
        ("vllm.platforms", "vllm.platform_plugins"),
        ("vllm.platform_plugin", "vllm.platform_plugins"),
        ("vllm.logits_processor", "vllm.logits_processors"),
        ("vllm.stat_loggers", "vllm.stat_logger_plugins"),
        ("vllm.io_processors", "vllm.io_processor_plugins"),
        ("vllm_graft.plugin", "vllm_graft.plugins"),
        ("vllm.graft.plugins", "vllm_graft.plugins"),
    ],
)
def test_a_group_that_looks_like_another_is_an_error_with_the_one_that_is_meant(site, group, meant):
    site.package("vllm", {})
    site.package("mine", {group: {"mine": "mine:register"}})
    (finding,) = site.found("D011")
    assert (finding.level, finding.subject) == ("error", f"group {group!r} of mine")
    assert f"did you mean {meant!r}?" in finding.what


@pytest.mark.parametrize("group", ["vllm.plugins", "vllm.model_plugins"])
def test_one_that_resembles_another_is_a_warning_because_somebody_else_may_read_it(site, group):
    site.package("mine", {group: {"mine": "mine:register"}})
    (finding,) = site.found("D011")
    assert finding.level == "warning"
    assert "did you mean 'vllm.general_plugins'?" in finding.what


def test_what_is_in_the_right_group_too_is_not_lost(site):
    groups = ("vllm.platforms", "vllm.platform_plugins")
    site.package("mine", {group: {"mine": "mine:register"} for group in groups})
    assert site.found("D011") == []


def test_a_group_under_vllms_name_that_is_like_none_is_a_warning(site):
    site.package("mine", {"vllm.zebra": {"mine": "mine:register"}})
    (finding,) = site.found("D011")
    assert finding.level == "warning"


@pytest.mark.parametrize("group", ["vllm_omni.general_plugins", "vllm_omni.things"])
def test_the_groups_of_another_package_are_its_own_business(site, group):
    site.package("vllm-omni", {})
    site.package("mine", {group: {"mine": "mine:register"}})
    assert site.found("D011") == []


def test_the_groups_that_exist_are_fine(site):
    groups = ("vllm.general_plugins", "vllm.endpoint_plugins", "vllm_graft.plugins")
    site.package("mine", {group: {"mine": "mine:register"} for group in groups})
    assert site.found("D011") == []
