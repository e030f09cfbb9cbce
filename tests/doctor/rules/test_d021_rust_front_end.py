"""D021: front-end plugins beside the Rust front end."""

import pytest

ENTRIES = {
    "vllm.general_plugins": {"general": "plug:register"},
    "vllm.stat_logger_plugins": {"stats": "plug:Stats"},
    "vllm.endpoint_plugins": {"routes": "plug:routes"},
    "vllm.io_processor_plugins": {"documents": "plug:documents"},
}


@pytest.fixture(autouse=True)
def _installed(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site.package("plug", ENTRIES, {"plug": ""})
    site.environ["VLLM_USE_RUST_FRONTEND"] = "1"


def test_a_stat_logger_is_lost(site):
    (finding,) = site.found("D021")
    assert (finding.level, finding.subject) == ("warning", "stat logger 'stats'")
    assert "the Rust front end loads no Python plugin" in finding.what
    site.environ["VLLM_PLUGINS"] = "stats"
    (finding,) = site.found("D021")
    assert finding.level == "error"


def test_a_plan_is_refused(site):
    site.environ["VLLM_CUSTOM_PATCHES"] = "async-history"
    plan, _ = site.found("D021")
    assert (plan.level, plan.subject) == ("error", "the plan")
    assert "names async-history" in plan.what
    site.environ["GRAFT_DISABLE"] = "1"
    assert [finding.subject for finding in site.found("D021")] == ["stat logger 'stats'"]


def test_endpoints_and_io_processors_are_lost_where_they_are_asked_for(site):
    site.environ["VLLM_PLUGINS"] = "routes,documents"
    site.arguments = ["--io-processor-plugin", "documents"]
    assert {finding.subject: finding.level for finding in site.found("D021")} == {
        "endpoint plugin 'routes'": "error",
        "IO processor 'documents'": "error",
    }


def test_lora_resolvers_are_lost(site, tmp_path):
    site.environ |= {"VLLM_LORA_RESOLVER_CACHE_DIR": str(tmp_path), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    assert "LoRA resolver 'lora_filesystem_resolver'" in {finding.subject for finding in site.found("D021")}


def test_the_python_front_end_loads_them(site):
    site.environ["VLLM_USE_RUST_FRONTEND"] = "0"
    assert site.found("D021") == []
    del site.environ["VLLM_USE_RUST_FRONTEND"]
    assert site.found("D021") == []
