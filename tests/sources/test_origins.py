"""Where upstream's modules are read from: which there are, and what a damaged wheel is answered with."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.sources import Installed, Tree, Wheel
from vllm_graft.sources.origins import module_of

FILES = {
    "vllm/__init__.py": "from vllm.deep.core import helper\n",
    "vllm/deep/__init__.py": "",
    "vllm/deep/core.py": "def helper(): ...\n" * 50,
    "vllm/bare/module.py": "",
    "vllm/deep/not-a-module.py": "",
    "vllm/deep/data.json": "{}",
    "other/module.py": "",
}
MODULES = ["vllm", "vllm.bare.module", "vllm.deep", "vllm.deep.core"]


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-9.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("kind", ["tree", "wheel", "installed"])
def test_every_source_lists_its_modules(kind, wheel, tmp_path, monkeypatch):
    """Those of vllm, sorted, whether or not a folder has an __init__.py; nothing is imported."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "tree")
    monkeypatch.syspath_prepend(tmp_path / "tree")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    source = {"tree": lambda: Tree(tmp_path / "tree"), "wheel": lambda: Wheel(wheel), "installed": Installed}[kind]()
    assert list(source.modules()) == MODULES
    assert all(source.read(module) is not None for module in MODULES)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("path", "module"),
    [("vllm/a/__init__.py", "vllm.a"), ("vllm/a.py", "vllm.a"), ("vllm/a-b.py", None), ("vllm/a.so", None)],
)
def test_a_file_has_the_name_that_python_would_give_it(path, module):
    """Or none."""
    assert module_of(path) == module
    assert module_of("__init__.py") is None


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_truncated_wheel_is_refused(wheel, cut):
    """With the file and the next step."""
    wheel.write_bytes(wheel.read_bytes()[:-cut])
    with pytest.raises(ConfigError, match=r"\.whl: the wheel is cut short or damaged.*download it again"):
        Wheel(wheel)


def test_a_damaged_member_is_refused(wheel):
    """The others can be read."""
    data = bytearray(wheel.read_bytes())
    at = data.index(b"vllm/deep/core.py") + len("vllm/deep/core.py") + 5
    data[at] ^= 0xFF
    wheel.write_bytes(bytes(data))
    source = Wheel(wheel)
    assert source.read("vllm").text
    with pytest.raises(ConfigError, match=r"\.whl: the wheel is damaged at vllm/deep/core\.py.*download it again"):
        source.read("vllm.deep.core")


def test_what_is_no_wheel_is_refused(tmp_path):
    """Another file, a folder, nothing; nor what has no end."""
    page = tmp_path / "page.whl"
    page.write_text("<html>")
    os.mkfifo(tmp_path / "pipe.whl")
    for path in (tmp_path / "pipe.whl", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="it is not a regular file"):
            Wheel(path)
    for path, what in ((page, "it is not a wheel"), (tmp_path, "cannot be read"), (tmp_path / "x.whl", "no such file")):
        with pytest.raises(ConfigError, match=what):
            Wheel(path)
