"""D004: one entry-point name, registered twice."""

from pathlib import Path

from vllm_graft.testing.packages import lay_out


def two(site, tmp_path: Path, group: str, second: str = "second:register", other_group: str = "") -> None:
    """Two packages with one name, the order fixed by the path."""
    site.package("first", {group: {"same": "first:register"}})
    lay_out(tmp_path / "later", "second", {other_group or group: {"same": second}})
    site.path.append(str(tmp_path / "later"))


def test_the_last_on_the_path_wins_and_the_message_says_so(site, tmp_path):
    two(site, tmp_path, "vllm.general_plugins")
    (finding,) = site.found("D004")
    assert (finding.level, finding.subject) == ("error", "plugin 'same'")
    assert "the last that it finds, which is that of second" in finding.what
    assert finding.where == "entry points of vllm.general_plugins"


def test_it_is_the_last_by_the_path_not_by_the_alphabet(site, tmp_path):
    two(site, tmp_path, "vllm.general_plugins")
    site.path.reverse()
    (finding,) = site.found("D004")
    assert "which is that of first" in finding.what


def test_two_packages_that_register_the_same_object_lose_nothing(site, tmp_path):
    two(site, tmp_path, "vllm.general_plugins", second="first:register")
    assert site.found("D004") == []


def test_a_name_that_is_switched_off_is_not_fought_over(site, tmp_path):
    two(site, tmp_path, "vllm.general_plugins")
    site.environ["VLLM_PLUGINS"] = "other"
    assert site.found("D004") == []


def test_logits_processors_are_kept_in_a_list_so_both_load(site, tmp_path):
    two(site, tmp_path, "vllm.logits_processors")
    assert site.found("D004") == []


def test_two_offers_of_one_item_stop_every_plan_of_vllm_graft(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two(site, tmp_path, "vllm_graft.plugins")
    (finding,) = site.found("D004")
    assert (finding.level, finding.subject) == ("warning", "item 'same'")
    assert "refuses every plan" in finding.what
    site.environ["VLLM_CUSTOM_PATCHES"] = "async-history"
    (finding,) = site.found("D004")
    assert finding.level == "error"


def test_io_processors_that_no_server_uses_are_a_warning(site, tmp_path):
    two(site, tmp_path, "vllm.io_processor_plugins")
    (finding,) = site.found("D004")
    assert finding.level == "warning"
    site.arguments = ["--io-processor-plugin", "same"]
    (finding,) = site.found("D004")
    assert finding.level == "error"


def test_one_name_in_two_groups_matters_to_the_list_alone(site, tmp_path):
    two(site, tmp_path, "vllm.general_plugins", other_group="vllm.stat_logger_plugins")
    assert site.found("D004") == []
    site.environ["VLLM_PLUGINS"] = "same"
    (finding,) = site.found("D004")
    assert (finding.level, finding.where) == ("info", "VLLM_PLUGINS")


def test_one_package_may_use_its_name_in_two_groups(site):
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    site.package("mine", {group: {"mine": "mine:register"} for group in groups})
    site.environ["VLLM_PLUGINS"] = "mine"
    assert site.found("D004") == []
