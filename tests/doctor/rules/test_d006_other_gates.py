"""D006: groups that do not obey VLLM_PLUGINS as the others do."""

LOGITS = {"vllm.logits_processors": {"logits": "mine:Logits"}}
ENDPOINT = {"vllm.endpoint_plugins": {"routes": "mine:routes"}, "vllm.general_plugins": {"mine": "mine:register"}}


def test_a_logits_processor_that_is_not_listed_loads_all_the_same(site):
    site.package("mine", LOGITS)
    site.environ["VLLM_PLUGINS"] = "other"
    (finding,) = site.found("D006")
    assert (finding.level, finding.subject) == ("warning", "plugin 'logits' of mine")
    assert "vLLM loads it anyway" in finding.what


def test_a_logits_processor_that_is_listed_or_without_a_list_is_as_expected(site):
    site.package("mine", LOGITS)
    assert site.found("D006") == []
    site.environ["VLLM_PLUGINS"] = "logits"
    assert site.found("D006") == []


def test_an_endpoint_plugin_needs_a_list_and_the_fix_keeps_the_others_on(site):
    site.package("mine", ENDPOINT)
    (finding,) = site.found("D006")
    assert (finding.level, finding.subject) == ("warning", "plugin 'routes' of mine")
    assert finding.fix == "set VLLM_PLUGINS=mine,routes, which keeps the others on"


def test_an_endpoint_plugin_that_is_listed_is_fine(site):
    site.package("mine", ENDPOINT)
    site.environ["VLLM_PLUGINS"] = "mine,routes"
    assert site.found("D006") == []
