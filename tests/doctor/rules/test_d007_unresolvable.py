"""D007: an entry point whose module or object is not there."""

import sys

import pytest


def lay(site, value: str, group: str = "vllm.general_plugins", **modules: str) -> None:
    site.package("mine", {group: {"mine": value}}, modules)


def test_a_module_that_is_not_there_is_an_error_with_what_vllm_does_then(site):
    lay(site, "nowhere_at_all:register")
    (finding,) = site.found("D007")
    assert (finding.level, finding.subject) == ("error", "plugin 'mine' of mine")
    assert "there is no module 'nowhere_at_all'" in finding.what
    assert "logs a traceback and continues without it" in finding.what


def test_a_module_below_a_package_is_looked_for_without_importing_the_package(site):
    folder = site.folder / "graft_doctor_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "there.py").write_text("def register(): ...\n")
    lay(site, "graft_doctor_package.there:register")
    assert site.found("D007") == []
    lay(site, "graft_doctor_package.gone:register")
    (finding,) = site.found("D007")
    assert "there is no module 'graft_doctor_package.gone'" in finding.what
    assert "graft_doctor_package" not in sys.modules


def test_packages_without_init_are_found_too(site):
    folder = site.folder / "graft_doctor_outer" / "inner"
    folder.mkdir(parents=True)
    (folder / "plugin.py").write_text("def register(): ...\n")
    lay(site, "graft_doctor_outer.inner.plugin:register")
    assert site.found("D007") == []
    lay(site, "graft_doctor_outer.inner.gone:register")
    assert len(site.found("D007")) == 1


def test_an_object_that_the_module_does_not_bind_is_an_error_with_the_nearest(site):
    lay(site, "mine_plugin:regster", mine_plugin="def register(): ...\n")
    (finding,) = site.found("D007")
    assert "mine_plugin.py binds no 'regster' (did you mean 'register'?)" in finding.what


def test_a_module_that_is_not_valid_python_is_an_error_with_the_line(site):
    lay(site, "mine_plugin:register", mine_plugin="x = 1\ndef register(:\n")
    (finding,) = site.found("D007")
    assert "mine_plugin.py:2 is not valid Python" in finding.what


def test_a_method_that_the_class_does_not_have_is_an_error(site):
    lay(site, "mine_plugin:Plugin.gone", mine_plugin="class Plugin:\n    def there(self): ...\n")
    (finding,) = site.found("D007")
    assert "the class Plugin" in finding.what


@pytest.mark.parametrize(
    "text",
    [
        "def register(): ...\n",
        "async def register(): ...\n",
        "class register: ...\n",
        "register = print\n",
        "register: object = print\n",
        "one, (register, two) = 1, (2, 3)\n",
        "from os import getcwd as register\n",
        "import os.path as register\n",
        "try:\n    import nothing\nexcept ImportError:\n    def register(): ...\n",
        "if True:\n    register = 1\n",
        "with open('x') as register: ...\n",
        "for register in (print,): ...\n",
        "if (register := print): ...\n",
        "def make():\n    global register\n    register = print\nmake()\n",
        "from os import *\n",
        "def __getattr__(name): return print\n",
        "globals()['register'] = print\n",
        "import sys\nsys.modules[__name__].register = print\n",
    ],
)
def test_every_way_to_bind_a_name_and_every_doubt_is_respected(site, text):
    lay(site, "mine_plugin:register", mine_plugin=text)
    assert site.found("D007") == []


@pytest.mark.parametrize("value", ["mine_plugin:Plugin.make", "mine_plugin:Other.make", "mine_plugin"])
def test_methods_inherited_methods_and_whole_modules_are_no_fault_of_this_kind(site, value):
    text = "import os\nclass Plugin:\n    def make(): ...\nclass Other(os.PathLike): ...\n"
    lay(site, value, mine_plugin=text)
    assert site.found("D007") == []


def test_a_package_that_changes_where_its_modules_are_found_is_believed(site):
    folder = site.folder / "graft_doctor_moved"
    folder.mkdir()
    (folder / "__init__.py").write_text("__path__.append('/elsewhere')\n")
    lay(site, "graft_doctor_moved.plugin:register")
    assert site.found("D007") == []


def test_built_in_modules_and_those_without_a_source_are_believed(site):
    lay(site, "sys:exit")
    assert site.found("D007") == []


@pytest.mark.parametrize(
    ("group", "then"),
    [("vllm.logits_processors", "refuses to start"), ("vllm_graft.plugins", "a plan that names it is refused")],
)
def test_what_comes_of_it_depends_on_the_group(site, group, then):
    lay(site, "nowhere_at_all:Thing", group)
    (finding,) = site.found("D007")
    assert then in finding.what


def test_an_item_that_no_plan_names_is_a_warning(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay(site, "nowhere_at_all:Thing", "vllm_graft.plugins")
    assert [finding.level for finding in site.found("D007")] == ["warning"]
    site.environ["VLLM_CUSTOM_PATCHES"] = "mine"
    assert [finding.level for finding in site.found("D007")] == ["error"]


def test_an_io_processor_that_no_server_uses_is_a_warning(site):
    lay(site, "nowhere_at_all:name", "vllm.io_processor_plugins")
    assert [finding.level for finding in site.found("D007")] == ["warning"]
    site.arguments = ["--io-processor-plugin=mine"]
    assert [finding.level for finding in site.found("D007")] == ["error"]


def test_one_that_is_switched_off_is_told_as_such(site):
    lay(site, "nowhere_at_all:register")
    site.environ["VLLM_PLUGINS"] = ""
    (finding,) = site.found("D007")
    assert finding.level == "warning"
    assert "goes unnoticed for now" in finding.what


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        ("import nowhere_at_all\n", "there is no module 'nowhere_at_all'"),
        ("from nowhere_at_all.below import name\n", "there is no module 'nowhere_at_all'"),
        ("import vllm.nowhere\n", "there is no module 'vllm.nowhere'"),
        ("from vllm.v1.request import Gone\n", "binds no 'Gone'"),
    ],
)
def test_an_import_of_the_module_that_fails_loses_the_plugin(site, text, lacking):
    site.path += sys.path
    lay(site, "mine_plugin:register", mine_plugin=f"import json\n{text}def register(): ...\n")
    (finding,) = site.found("D007")
    assert (finding.level, finding.where.rpartition("/")[2]) == ("error", "mine_plugin.py:2")
    assert lacking in finding.what
    assert "continues without it" in finding.what


def test_an_import_that_fails_in_a_module_below(site):
    folder = site.folder / "graft_doctor_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .below import register\n")
    (folder / "below.py").write_text("import nowhere_at_all\ndef register(): ...\n")
    lay(site, "graft_doctor_package:register")
    (finding,) = site.found("D007")
    assert finding.where.endswith("below.py:1")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import nowhere_at_all\nexcept ImportError: ...\n",
        "if __debug__ is None:\n    import nowhere_at_all\n",
        "import sys, shim\nsys.modules['nowhere_at_all'] = shim\nimport nowhere_at_all\n",
        "def later():\n    import nowhere_at_all\n",
        "import json, sys, packaging.version\nfrom vllm.v1.request import Request\nfrom vllm import LLM\n",
    ],
)
def test_imports_that_work_or_may(site, text):
    site.path += sys.path
    lay(site, "mine_plugin:register", mine_plugin=f"{text}def register(): ...\n")
    assert site.found("D007") == []


BOOT = "import sys\nsys.path.insert(0, 'vendored')\n"


@pytest.mark.parametrize(
    "texts",
    [
        {"__init__": BOOT},
        {"boot": BOOT, "plugin": "from . import boot\n"},
        {"boot": BOOT, "plugin": "try:\n    from . import boot\nexcept OSError: ...\n"},
        {"boot": BOOT, "between": "from graft_doctor_package import boot\n", "__init__": "from . import between\n"},
        {"__init__": "from sys import path as where\nwhere.append('vendored')\n"},
        {"__init__": "import site\nsite.addsitedir('vendored')\n"},
    ],
)
def test_a_module_read_before_may_change_where_imports_are_found(site, texts):
    folder = site.folder / "graft_doctor_package"
    folder.mkdir()
    plugin = texts.get("plugin", "") + "import nowhere_at_all\ndef register(): ...\n"
    for name, text in {"__init__": "", **texts, "plugin": plugin}.items():
        (folder / f"{name}.py").write_text(text)
    lay(site, "graft_doctor_package.plugin:register")
    assert site.found("D007") == []


def test_the_functions_for_paths_change_no_import(site):
    text = "import os\nhere = os.path.dirname(__file__)\nimport nowhere_at_all\ndef register(): ...\n"
    lay(site, "mine_plugin:register", mine_plugin=text)
    assert len(site.found("D007")) == 1
