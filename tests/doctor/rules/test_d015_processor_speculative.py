"""D015: logits processors and speculative decoding."""

import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", '{"method": "eagle", "model": "x"}'],
        ["--speculative_config.model", "x"],
        ["-sc", '{"model": "x"}'],
        ["--spec-method", "eagle"],
    ],
)
def test_an_installed_processor_is_dropped_by_the_v1_runner(site, arguments, processors, found_on):
    processors.install(processors.V1)
    site.arguments = arguments
    (finding,) = found_on("D015", "0.28.0")
    assert (finding.level, finding.subject) == ("warning", "logits processor 'mine'")
    assert "silently does not load it" in finding.what


def test_one_that_is_named_is_refused(site, processors, found_on):
    site.arguments = ["--spec-method", "eagle", "--logits-processors", "plug:Processor"]
    (finding,) = found_on("D015", "0.28.0")
    assert (finding.level, finding.where) == ("error", "--logits-processors")


def test_pooling_models_have_none_to_lose(site, processors, found_on):
    processors.install(processors.V1)
    site.arguments = ["--spec-method", "eagle", "--runner", "pooling"]
    assert found_on("D015", "0.28.0") == []


def test_newer_releases_drop_it_where_they_take_the_v1_runner(site, processors, found_on):
    processors.install(processors.BOTH)
    site.arguments = ["--speculative-config.method", "eagle"]
    assert found_on("D015", "0.32.0") == []
    site.arguments = ["--speculative-config.method", "suffix"]
    assert len(found_on("D015", "0.32.0")) == 1
    site.arguments = ["--speculative-config.method", "ngram"]
    assert (len(found_on("D015", "0.31.0")), found_on("D015", "0.32.0")) == (1, [])


def test_without_speculative_decoding_or_processors_all_is_well(site, processors, found_on):
    site.arguments = ["--spec-method", "eagle"]
    assert found_on("D015", "0.28.0") == []
    processors.install(processors.V1)
    site.arguments = ["--port", "1"]
    assert found_on("D015", "0.28.0") == []
