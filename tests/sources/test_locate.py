"""Modules found by name without importing the packages above them."""

import sys

import pytest

from vllm_graft.sources.locate import find_spec, source_of
from vllm_graft.sources.modules import Missing, SourceModule, read_module


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "plain.py": "x = 1",
        "package/__init__.py": "raise RuntimeError",
        "package/inner.py": "y = 2",
        "space/deep/module.py": "z = 3",
        "own/__init__.py": "__path__ = []",
        "broken.py": "def f(:",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["plain", "package", "package.inner", "space.deep.module"])
@pytest.mark.parametrize("given", [True, False])
def test_a_module_is_found_and_nothing_is_imported(folder, monkeypatch, name, given):
    """On a path or in this interpreter; a folder without __init__.py is a package too."""
    if not given:
        monkeypatch.syspath_prepend(folder)
    spec = find_spec(name, [str(folder)] if given else None)
    assert source_of(spec) is not None
    assert not {"plain", "package", "space"} & set(sys.modules)


def test_what_is_not_found_has_no_spec(folder):
    """Nor has a module inside of what is no package."""
    for name in ("nothing", "package.nothing", "nothing.inner", "plain.inner", "space.nothing"):
        assert find_spec(name, [str(folder)]) is None
    assert find_spec("sys", [str(folder)]) is not None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "there is no module 'nothing'"),
        ("package.nothing.inner", "there is no module 'package.nothing'"),
        ("space.nothing", "there is no module 'space.nothing'"),
        ("broken", "is not valid Python"),
    ],
)
def test_a_module_that_cannot_be_imported_is_missing_with_the_reason(folder, name, why):
    """The first part that is not there is named."""
    found = read_module(name, [str(folder)])
    assert isinstance(found, Missing)
    assert why in found.why


def test_where_a_package_finds_its_modules_itself_nothing_is_missing(folder):
    """Only an import could tell; nor has a folder without a file a source."""
    assert read_module("own.anything", [str(folder)]) is None
    assert read_module("space", [str(folder)]) is None
    assert isinstance(read_module("package.inner", [str(folder)]), SourceModule)
