"""D002: blanks in VLLM_PLUGINS."""

GENERAL = {"vllm.general_plugins": {"good": "good_plugin:register", "other": "good_plugin:register"}}


def test_a_blank_before_a_known_name_is_an_error_that_says_what_to_write(site):
    site.package("good", GENERAL)
    site.environ["VLLM_PLUGINS"] = "good, other"
    (finding,) = site.found("D002")
    assert finding.subject == "plugin 'other'"
    assert finding.fix == "write VLLM_PLUGINS=good,other"
    assert site.found("D001") == []


def test_names_without_blanks_are_fine(site):
    site.package("good", GENERAL)
    site.environ["VLLM_PLUGINS"] = "good,other"
    assert site.found("D002") == []
