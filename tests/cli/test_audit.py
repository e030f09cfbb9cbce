"""The command: what it prints in each form, which base it takes, and what it says where something is missing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from vllm_graft.cli import main
from vllm_graft.versions import vllm_version

PATCH = (
    "from vllm.v1.core.sched.scheduler import Scheduler\n"
    "def schedule(self, throttle_prefills=False):\n    return None\n"
    "Scheduler.schedule = schedule\n"
)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    folder = tmp_path / "my_plugin"
    folder.mkdir()
    (folder / "__init__.py").write_text(PATCH, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def audited(capsys, *words) -> tuple[int, str, str]:
    status = main(["audit", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_changed_target_is_in_the_table_and_among_the_findings(plugin, capsys):
    status, out, _ = audited(capsys, plugin, "--base", "0.26.0", "--against", "0.32.0", "--offline")
    assert "compared with 0.26.0 (--base)" in out
    assert "v1.core.sched.scheduler:Scheduler.schedule" in out
    assert "P209" in out or "P203" in out
    assert status == int("error" in out)


def test_json_has_rows_and_findings_with_stable_keys(plugin, capsys):
    _, out, _ = audited(capsys, plugin, "--base", "0.31.0", "--against", "0.32.0", "--offline", "--json")
    document = json.loads(out)
    assert set(document) == {"base", "base_because", "releases", "packages", "rows", "findings"}
    (row,) = [row for row in document["rows"] if row["way"] == "replace"]
    assert row["name"] == "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    assert row["cells"] == [{"release": "0.32.0", "since": "0.31.0", "state": "body", "detail": "", "now": ""}]


def test_a_package_after_the_releases_is_a_package(plugin, capsys):
    """``--against`` takes several words, and would take the package for one of them."""
    status, out, err = audited(capsys, "--offline", "--base", "0.31.0", "--against", "0.32.0", plugin)
    assert (status, err) == (0, "")
    assert "vLLM 0.32.0, compared with 0.31.0" in out
    assert "Scheduler.schedule" in out


def test_a_package_with_a_digit_in_its_name_is_a_package(tmp_path, capsys, monkeypatch):
    (tmp_path / "k8s_plugin").mkdir()
    (tmp_path / "k8s_plugin" / "__init__.py").write_text("import vllm\n")
    monkeypatch.chdir(tmp_path)
    status, _, err = audited(capsys, "--offline", "--base", "0.31.0", "--against", "0.32.0", "k8s_plugin")
    assert (status, err) == (0, "")


@pytest.mark.parametrize("form", ["--json", "--markdown", "--all", "--copies"])
def test_the_installed_vllm_is_audited_without_a_server(plugin, capsys, form):
    """Its sources are on the disk, for verdicts and for diffs."""
    status, out, err = audited(capsys, plugin, "--offline", "--against", "installed", form)
    assert status == 0
    assert "Scheduler.schedule" in out
    assert vllm_version() not in err
    assert audited(capsys, "--offline", "--against", "installed", plugin)[0] == 0


def test_the_matrix_has_a_cell_for_each_step(plugin, capsys):
    _, out, _ = audited(capsys, plugin, "--matrix", "--offline", "--json")
    document = json.loads(out)
    assert document["releases"] == ["0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"]
    (row,) = [row for row in document["rows"] if row["way"] == "replace"]
    assert [cell["since"] for cell in row["cells"]] == ["0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0"]


def test_the_matrix_begins_after_the_base(plugin, capsys):
    words = (plugin, "--matrix", "--offline", "--json", "--base")
    document = json.loads(audited(capsys, *words, "0.30.0")[1])
    assert document["releases"] == ["0.31.0", "0.32.0"]
    assert {cell["since"] for row in document["rows"] for cell in row["cells"]} == {"0.30.0", "0.31.0"}
    status, _, err = audited(capsys, *words, "0.32.0")
    assert status == 2
    assert "no release after 0.32.0" in err


def test_markdown_and_html_say_that_diffs_are_missing_where_no_source_is_here(plugin, capsys, tmp_path):
    words = (plugin, "--base", "0.30.0", "--against", "0.31.0", "--offline")
    _, out, err = audited(capsys, *words, "--markdown")
    assert "Scheduler.schedule" in out
    assert "the sources of 0.30.0, 0.31.0 are not available" in err
    audited(capsys, *words, "--html", tmp_path / "page.html", "--no-diff")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Scheduler.schedule" in page
    assert "<script" not in page


def test_the_release_that_a_package_pins_is_its_base(plugin, capsys):
    (plugin / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\ndependencies = ["vllm==0.28.0"]\n')
    _, out, _ = audited(capsys, plugin, "--against", "0.30.0", "--offline")
    assert "compared with 0.28.0 (my_plugin pins it in pyproject.toml: vllm==0.28.0)" in out


def test_the_newest_release_in_the_range_that_a_package_allows_is_its_base(plugin, capsys):
    (plugin / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["vllm<0.29,>=0.24"]\n')
    _, out, _ = audited(capsys, plugin, "--against", "0.30.0", "--offline")
    assert "compared with 0.28.0 (the newest within my_plugin's vllm>=0.24,<0.29 in pyproject.toml)" in out


def test_a_package_with_the_number_of_a_release_that_it_speaks_of_is_compared_with_that(plugin, capsys):
    (plugin / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "0.28.0.post1"\n')
    readme = plugin / "README.md"
    readme.write_text("p 0.28.0 is tested with vLLM v0.28.0.\n")
    _, out, _ = audited(capsys, plugin, "--against", "0.30.0", "--offline")
    assert "compared with 0.28.0 (my_plugin has its number, and README.md mentions vLLM 0.28.0)" in out
    for text in ("vllm-p 0.28.0 is out.\n", "It needs vLLM 0.28.0.1.\n", ""):
        readme.write_text(text)
        _, out, _ = audited(capsys, plugin, "--against", "0.30.0", "--offline")
        assert "has its number" not in out


def test_a_release_with_the_number_of_a_package_that_cannot_be_had_is_left_aside(plugin, capsys):
    (plugin / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "0.3.0"\n')
    (plugin / "README.md").write_text("For vLLM 0.3.0.\n")
    status, out, _ = audited(capsys, plugin, "--against", "0.30.0", "--offline")
    assert status in (0, 1)
    assert "has its number" not in out


def test_a_range_of_which_no_release_is_known_is_named(plugin, capsys, monkeypatch):
    monkeypatch.setattr("vllm_graft.versions.vllm_version", lambda: None)
    (plugin / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["vllm>=0.17,<0.18.1"]\n')
    _, out, _ = audited(capsys, plugin, "--against", "0.32.0", "--offline", "--json")
    document = json.loads(out)
    assert document["base"] == "0.31.0"
    within = "within my_plugin's vllm>=0.17,<0.18.1 in pyproject.toml"
    assert document["base_because"] == f"the one before; no release is known here {within}"


def test_a_tree_and_a_wheel_are_read_as_they_are(plugin, capsys, tmp_path):
    module = tmp_path / "tree" / "vllm" / "v1" / "core" / "sched"
    module.mkdir(parents=True)
    for folder in (module, *module.parents[:3]):
        (folder / "__init__.py").write_text("")
    (tmp_path / "tree" / "vllm" / "_version.py").write_text('__version__ = "9.9.0"\n')
    (module / "scheduler.py").write_text("class Scheduler:\n    pass\n")
    wheel = tmp_path / "vllm-9.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (tmp_path / "tree").rglob("*.py"):
            archive.write(file, file.relative_to(tmp_path / "tree").as_posix())
    for words in (("--tree", tmp_path / "tree"), ("--wheel", wheel)):
        status, out, _ = audited(capsys, plugin, "--base", "0.32.0", *words, "--offline")
        assert status == 1
        assert "9.9.0" in out
        assert "P201 error: replace vllm.v1.core.sched.scheduler:Scheduler.schedule: it is gone" in out


def test_half_a_wheel_is_an_error_that_names_it(plugin, capsys, tmp_path):
    wheel = tmp_path / "vllm-9.9.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "x = 1\n" * 1000)
    wheel.write_bytes(wheel.read_bytes()[:-40])
    status, _, err = audited(capsys, plugin, "--wheel", wheel, "--base", "0.32.0", "--offline")
    assert status == 2
    assert wheel.name in err


def test_a_release_that_is_nowhere_is_an_error_offline(plugin, capsys):
    status, _, err = audited(capsys, plugin, "--against", "0.99.0", "--offline")
    assert status == 2
    assert "0.99.0" in err
    assert "--offline" in err


def test_a_package_that_is_not_there_is_an_error(capsys):
    status, _, err = audited(capsys, "no_such_package_at_all", "--offline")
    assert status == 2
    assert "no_such_package_at_all" in err


def test_a_syntax_error_is_reported_and_the_rest_is_audited(plugin, capsys):
    (plugin / "bad.py").write_text("import vllm\ndef (:\n")
    status, out, _ = audited(capsys, plugin, "--base", "0.31.0", "--against", "0.32.0", "--offline")
    assert status == 1
    assert "P220 error" in out
    assert "bad.py:2" in out
    assert "Scheduler.schedule" in out


@pytest.mark.parametrize("name", ["v0.32.0", "0.32", "0.32.0+cpu"])
def test_a_release_may_be_written_otherwise(plugin, capsys, name):
    """And is not compared with itself because of that."""
    _, out, _ = audited(capsys, plugin, "--against", name, "--offline")
    assert out.startswith("vLLM 0.32.0, compared with 0.31.0 (the one before)")


def test_a_base_may_be_a_build(plugin, capsys):
    (plugin / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["vllm==0.28.0+cpu"]\n')
    _, out, _ = audited(capsys, plugin, "--offline")
    assert "compared with 0.28.0 (my_plugin pins it in pyproject.toml: vllm==0.28.0+cpu)" in out


def test_an_installed_build_of_a_release_is_no_base_for_that_release(plugin, capsys, monkeypatch):
    monkeypatch.setattr("vllm_graft.versions.vllm_version", lambda: "0.32.0+cpu")
    _, out, _ = audited(capsys, plugin, "--against", "0.32.0", "--offline")
    assert "compared with 0.31.0 (the one before)" in out


def test_releases_and_packages_named_twice_count_once(plugin, capsys):
    words = (plugin, plugin, "--against", "0.30.0", "0.32.0", "0.30", "--base", "0.29.0", "--offline", "--json")
    document = json.loads(audited(capsys, *words)[1])
    assert document["releases"] == ["0.30.0", "0.32.0"]
    assert len(document["packages"]) == 1


@pytest.mark.parametrize(
    ("stated", "base"),
    [
        ("", "0.32.0 (the newest in the catalogue)"),
        ("0.1.dev7+gabc", "0.32.0 (the newest in the catalogue)"),
        ("0.29.1.dev3", "0.29.0 (the one before)"),
        ("0.20.0", "0.26.0 (the oldest in the catalogue)"),
    ],
)
def test_a_tree_is_compared_with_its_neighbour_where_no_vllm_is_installed(
    plugin, capsys, tmp_path, monkeypatch, stated, base
):
    """A checkout states no version, or one that means nothing: it is newer than what was released."""
    monkeypatch.setattr("vllm_graft.versions.vllm_version", lambda: None)
    (tmp_path / "tree" / "vllm").mkdir(parents=True)
    (tmp_path / "tree" / "vllm" / "__init__.py").write_text("")
    if stated:
        (tmp_path / "tree" / "vllm" / "_version.py").write_text(f'__version__ = "{stated}"\n')
    _, out, _ = audited(capsys, plugin, "--tree", tmp_path / "tree", "--offline")
    assert f"compared with {base}" in out


def test_a_page_that_cannot_be_written_is_an_error_that_names_it(plugin, capsys, tmp_path):
    status, _, err = audited(capsys, plugin, "--offline", "--no-diff", "--html", tmp_path / "none" / "page.html")
    assert status == 2
    assert "page.html: it cannot be written" in err


def test_names_from_other_packages_are_in_the_catalogue(tmp_path, capsys):
    """What a module of vLLM imports can be patched there, and is no mistake of the package's."""
    (tmp_path / "one.py").write_text(
        "import vllm.v1.worker.gpu_model_runner as runner\n"
        "from vllm.v1.worker.utils import defaultdict\n"
        "runner.time.sleep = runner.torch.cuda.synchronize = print\n"
    )
    status, out, _ = audited(capsys, tmp_path / "one.py", "--against", "0.32.0", "--offline")
    assert "4 unchanged" in out
    assert status == 0


def refuse_to_read(monkeypatch):
    def read_files(*_):
        raise AssertionError("it was read again")

    monkeypatch.setattr("vllm_graft.audit.uses.read_files", read_files)


def test_a_second_run_reads_nothing_and_says_the_same(plugin, capsys, monkeypatch):
    words = (plugin, "--against", "0.32.0", "--base", "0.28.0", "--offline", "--all")
    first = audited(capsys, *words)
    refuse_to_read(monkeypatch)
    assert audited(capsys, *words) == first
    with pytest.raises(AssertionError):
        audited(capsys, *words, "--no-cache")


def test_another_release_is_audited_without_reading_the_package_again(plugin, capsys, monkeypatch):
    words = (plugin, "--base", "0.28.0", "--offline", "--all", "--against")
    audited(capsys, *words, "0.31.0")
    fresh = audited(capsys, *words, "0.32.0", "--no-cache")
    refuse_to_read(monkeypatch)
    assert audited(capsys, *words, "0.32.0") == fresh


def test_a_changed_file_is_read_again(plugin, capsys):
    words = (plugin, "--against", "0.32.0", "--base", "0.28.0", "--offline", "--json")
    before = json.loads(audited(capsys, *words)[1])
    (plugin / "more.py").write_text("import vllm.gone_for_good\n", encoding="utf-8")
    after = json.loads(audited(capsys, *words)[1])
    assert "vllm.gone_for_good" in {row["name"] for row in after["rows"]} - {row["name"] for row in before["rows"]}


def test_nothing_is_kept_on_request(plugin, capsys, tmp_path):
    audited(capsys, plugin, "--offline", "--no-cache")
    assert not (tmp_path / "cache" / "vllm-graft" / "reports").exists()
    assert not (tmp_path / "cache" / "vllm-graft" / "readings").exists()


def test_a_cache_that_cannot_be_written_costs_nothing_but_a_line(plugin, capsys, tmp_path):
    """A full disk or a folder without permission; here a file stands where the folder would be."""
    words = (plugin, "--against", "0.32.0", "--base", "0.28.0", "--offline")
    status, out, _ = audited(capsys, *words, "--no-cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "vllm-graft").write_text("", encoding="utf-8")
    again, same, err = audited(capsys, *words)
    assert (again, same) == (status, out)
    assert "the report cannot be cached for the next run" in err
