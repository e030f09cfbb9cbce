"""D020: several API servers and adapters loaded at run time."""

import pytest

UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-server-count", "2"],
        ["-asc", "2"],
        ["--data-parallel-size", "2"],
        ["-dp", "2"],
        ["--data-parallel-hybrid-lb", "--data-parallel-size", "4", "--data-parallel-size-local", "2"],
    ],
)
def test_more_than_one_api_server_is_refused(site, arguments, tmp_path):
    site.arguments = arguments
    site.environ.update({UPDATING: "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(tmp_path)})
    (finding,) = site.found("D020")
    assert (finding.level, finding.subject) == ("error", "LoRA resolvers 'lora_filesystem_resolver'")
    assert "starts 2 API servers" in finding.what
    assert "--api-server-count 1" in finding.fix


def test_without_a_resolver_the_variable_is_the_subject(site):
    site.arguments = ["--api-server-count=3"]
    site.environ[UPDATING] = "1"
    (finding,) = site.found("D020")
    assert finding.subject == UPDATING


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--api-server-count", "1", "--data-parallel-size", "2"],
        ["--data-parallel-size", "2", "--data-parallel-rank", "0"],
        ["--data-parallel-size", "2", "--headless"],
    ],
)
def test_one_api_server_is_fine(site, arguments):
    site.arguments = arguments
    site.environ[UPDATING] = "1"
    assert site.found("D020") == []


def test_without_runtime_updating_or_with_the_rust_front_end_nothing_is_refused(site):
    site.arguments = ["--api-server-count", "2"]
    assert site.found("D020") == []
    site.environ.update({UPDATING: "1", "VLLM_USE_RUST_FRONTEND": "1"})
    assert site.found("D020") == []
