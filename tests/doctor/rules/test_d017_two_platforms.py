"""D017: more than one platform plugin."""

import pytest


@pytest.fixture
def platforms(site):
    """Lay out packages with a platform plugin each."""

    def lay_out(*names):
        for name in names:
            value = "vllm_graft.boot:platform" if name == "graft" else f"{name}:platform"
            package = "vllm-graft" if name == "graft" else f"vllm-{name}"
            site.package(package, {"vllm.platform_plugins": {name: value}})

    return lay_out


def test_two_platform_plugins_are_a_warning_that_names_both(site, platforms):
    platforms("one", "two")
    (finding,) = site.found("D017")
    assert finding.level == "warning"
    assert "one (vllm-one)" in finding.what
    assert "two (vllm-two)" in finding.what


def test_one_that_the_list_switches_off_does_not_count(site, platforms):
    platforms("one", "two")
    site.environ["VLLM_PLUGINS"] = "one"
    assert site.found("D017") == []


def test_ours_counts_only_when_the_simulated_device_is_asked_for(site, platforms):
    platforms("one", "graft")
    assert site.found("D017") == []
    site.environ["GRAFT_SIMULATE"] = "0"
    assert site.found("D017") == []
    site.environ["GRAFT_SIMULATE"] = "h200"
    (finding,) = site.found("D017")
    assert finding.fix.startswith("unset GRAFT_SIMULATE")
    site.environ["GRAFT_DISABLE"] = "1"
    assert site.found("D017") == []


def test_one_is_fine(site, platforms):
    platforms("one")
    assert site.found("D017") == []


def test_an_order_for_the_cpu_leaves_them_all_unasked(site, platforms):
    platforms("one", "two")
    site.environ["VLLM_TARGET_DEVICE"] = "cpu"
    assert site.found("D017") == []
