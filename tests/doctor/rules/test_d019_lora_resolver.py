"""D019: LoRA resolvers that are never asked."""

import pytest

FOLDER, HUB, UPDATING = (
    "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
)
OTHER = "def register():\n    from vllm.lora.resolver import LoRAResolverRegistry\n"


@pytest.fixture
def folder(site, tmp_path):
    site.environ[FOLDER] = str(tmp_path)


def test_a_folder_alone_lacks_runtime_updating(site, folder):
    (finding,) = site.found("D019")
    assert (finding.level, finding.subject) == ("warning", "plugin 'lora_filesystem_resolver'")
    assert finding.what.endswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING is not 1")
    assert finding.fix == "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


@pytest.mark.parametrize(
    ("variables", "arguments", "level"),
    [
        ({}, ["--port", "1"], "warning"),
        ({}, ["--enable-lora", "--lora-modules", "a=/a"], "warning"),
        ({}, ["--enable-lora"], "error"),
        ({UPDATING: "1"}, ["--port", "1"], "error"),
        ({"VLLM_PLUGINS": "lora_filesystem_resolver"}, [], "error"),
    ],
)
def test_it_is_an_error_where_more_than_the_folder_asks_for_it(site, folder, variables, arguments, level):
    """The folder may be part of an image whose servers serve no adapters."""
    site.environ.update(variables)
    site.arguments = arguments
    (finding,) = site.found("D019")
    assert finding.level == level


def test_all_that_is_missing_is_named(site, folder):
    site.environ["VLLM_PLUGINS"] = "other"
    site.arguments = ["--port", "1"]
    (finding,) = site.found("D019")
    for missing in ("VLLM_PLUGINS does not name", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "--enable-lora is not given"):
        assert missing in finding.what


def test_a_set_up_that_is_complete_is_fine(site, folder):
    site.environ[UPDATING] = "true"
    assert site.found("D019") == []
    site.arguments = ["--enable-lora"]
    site.environ["VLLM_PLUGINS"] = "lora_filesystem_resolver"
    assert site.found("D019") == []


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_is_none_stops_vllm(site, tmp_path, exists):
    place = tmp_path / "adapters"
    if exists:
        place.write_text("")
    site.environ.update({FOLDER: str(place), UPDATING: "1"})
    (finding,) = site.found("D019")
    assert ("is not a folder" if exists else "does not exist") in finding.what
    assert "stops every vLLM process" in finding.what


def test_a_resolver_that_is_named_without_a_source_does_nothing(site):
    site.environ.update({"VLLM_PLUGINS": "lora_filesystem_resolver", UPDATING: "1"})
    (finding,) = site.found("D019")
    assert finding.what.endswith("VLLM_LORA_RESOLVER_CACHE_DIR is not set")
    assert finding.level == "warning"
    site.environ[UPDATING] = "0"
    (finding,) = site.found("D019")
    assert finding.level == "info", "a list may name it only to keep on what is on without a list"


def test_the_one_that_downloads_must_be_named(site):
    site.environ.update({HUB: "org/repo", UPDATING: "1"})
    (finding,) = site.found("D019")
    assert finding.what.endswith("VLLM_PLUGINS does not name lora_hf_hub_resolver")
    site.environ["VLLM_PLUGINS"] = "lora_hf_hub_resolver"
    assert site.found("D019") == []


def test_another_package_s_resolver_is_not_asked_without_runtime_updating(site):
    site.package("plug", {"vllm.general_plugins": {"mine": "plug:register"}}, {"plug": OTHER})
    (finding,) = site.found("D019")
    assert (finding.level, finding.subject) == ("warning", "plugin 'mine'")
    site.environ[UPDATING] = "1"
    assert site.found("D019") == []


def test_runtime_updating_without_resolvers_is_a_set_up_of_its_own(site):
    site.environ[UPDATING] = "1"
    assert site.found("D019") == []
