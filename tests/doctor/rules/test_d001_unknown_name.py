"""D001: a name in VLLM_PLUGINS that nothing registers."""

GENERAL = {"vllm.general_plugins": {"good": "good_plugin:register"}}


def test_a_name_that_nothing_registers_is_an_error_with_the_nearest(site):
    site.package("good", GENERAL)
    site.environ["VLLM_PLUGINS"] = "good,goood"
    (finding,) = site.found("D001")
    assert (finding.level, finding.subject) == ("error", "plugin 'goood'")
    assert "did you mean 'good'?" in finding.what


def test_names_of_every_group_are_known(site):
    site.package("good", {**GENERAL, "vllm.stat_logger_plugins": {"stats": "good_plugin:Stats"}})
    site.environ["VLLM_PLUGINS"] = "good,stats"
    assert site.found("D001") == []


def test_without_the_variable_or_with_an_empty_one_there_is_nothing_to_say(site):
    site.package("good", GENERAL)
    assert site.found("D001") == []
    site.environ["VLLM_PLUGINS"] = ""
    assert site.found("D001") == []
