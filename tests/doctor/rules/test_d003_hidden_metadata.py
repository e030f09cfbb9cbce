"""D003: metadata that hides another distribution of the same name."""

from pathlib import Path

from vllm_graft.testing.packages import lay_out

GENERAL = "[vllm.general_plugins]\n"


def egg(folder: Path, name: str, version: str, entries: str) -> Path:
    """What `setup.py develop` leaves beside the sources."""
    info = folder / f"{name}.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    return info


def test_a_stale_egg_info_earlier_on_the_path_is_an_error_that_names_what_is_lost_and_both_places(site, tmp_path):
    stale = egg(tmp_path / "sources", "mine", "1.0", "[console_scripts]\nmine = mine:main\n")
    site.package("mine", {"vllm.general_plugins": {"mine": "mine:register"}})
    site.path.insert(0, str(tmp_path / "sources"))
    (finding,) = site.found("D003")
    assert (finding.level, finding.subject) == ("error", "package mine")
    assert "mine of vllm.general_plugins (mine:register)" in finding.what
    assert str(stale) in finding.what
    assert str(site.folder / "mine-1.0.dist-info") in finding.what


def test_another_object_under_the_same_name_is_told_with_the_one_that_is_taken(site, tmp_path):
    egg(tmp_path / "sources", "mine", "0.9", f"{GENERAL}mine = mine.old:register\n")
    site.package("mine", {"vllm.general_plugins": {"mine": "mine:register"}})
    site.path.insert(0, str(tmp_path / "sources"))
    (finding,) = site.found("D003")
    assert "mine:register, instead of which mine.old:register is taken" in finding.what


def test_a_copy_that_is_installed_as_a_whole_may_be_meant_to_go_first(site, tmp_path):
    """As in a virtual environment above that of the system: its code goes first too."""
    lay_out(tmp_path / "upper", "mine", {})
    site.package("mine", {"vllm.general_plugins": {"mine": "mine:register"}})
    site.path.insert(0, str(tmp_path / "upper"))
    (finding,) = site.found("D003")
    assert finding.level == "warning"


def test_items_of_vllm_graft_count_too(site, tmp_path):
    egg(tmp_path / "sources", "mine", "1.0", "")
    site.package("mine", {"vllm_graft.plugins": {"sink": "mine:Sink"}})
    site.path.insert(0, str(tmp_path / "sources"))
    (finding,) = site.found("D003")
    assert "sink of vllm_graft.plugins" in finding.what


def test_an_older_copy_behind_a_newer_one_is_only_good_to_know(site, tmp_path):
    egg(tmp_path / "sources", "mine", "2.0", "")
    site.package("mine", {"vllm.general_plugins": {"mine": "mine:register"}})
    site.path.insert(0, str(tmp_path / "sources"))
    (finding,) = site.found("D003")
    assert finding.level == "info"


def test_a_copy_that_registers_the_same_loses_nothing(site, tmp_path):
    egg(tmp_path / "sources", "mine", "1.0", f"{GENERAL}mine = mine:register\nmore = mine:more\n")
    site.package("mine", {"vllm.general_plugins": {"mine": "mine:register"}})
    site.path.insert(0, str(tmp_path / "sources"))
    assert site.found("D003") == []


def test_a_folder_that_is_twice_on_the_path_loses_nothing(site):
    site.package("mine", {"vllm.general_plugins": {"mine": "mine:register"}})
    site.path.append(str(site.folder))
    assert site.found("D003") == []
