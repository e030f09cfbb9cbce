"""D021: front-end plugins beside the Rust front end."""

import pytest

ENTRIES = {
    "vllm.general_plugins": {"general": "plug:register"},
    "vllm.stat_logger_plugins": {"stats": "plug:Stats"},
    "vllm.endpoint_plugins": {"routes": "plug:routes"},
    "vllm.io_processor_plugins": {"documents": "plug:documents"},
}


@pytest.fixture(autouse=True)
def _installed(site):
    site.package("plug", ENTRIES, {"plug": ""})
    site.environ["VLLM_USE_RUST_FRONTEND"] = "1"


def test_a_stat_logger_is_lost(site):
    (finding,) = site.found("D021")
    assert (finding.level, finding.subject) == ("error", "stat logger 'stats'")
    assert "the Rust front end loads no Python plugin" in finding.what


def test_endpoints_and_io_processors_are_lost_where_they_are_asked_for(site):
    site.environ["VLLM_PLUGINS"] = "routes,documents"
    site.arguments = ["--io-processor-plugin", "documents"]
    assert {finding.subject for finding in site.found("D021")} == {
        "endpoint plugin 'routes'",
        "IO processor 'documents'",
    }


def test_lora_resolvers_are_lost(site, tmp_path):
    site.environ |= {"VLLM_LORA_RESOLVER_CACHE_DIR": str(tmp_path), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    assert "LoRA resolver 'lora_filesystem_resolver'" in {finding.subject for finding in site.found("D021")}


def test_the_python_front_end_loads_them(site):
    site.environ["VLLM_USE_RUST_FRONTEND"] = "0"
    assert site.found("D021") == []
    del site.environ["VLLM_USE_RUST_FRONTEND"]
    assert site.found("D021") == []
