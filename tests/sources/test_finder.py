"""Finding a definition by reading: in the running vLLM, a tree and a wheel."""

import zipfile
from pathlib import Path

import pytest

from vllm_graft.errors import ConfigError
from vllm_graft.sources import Installed, Tree, Wheel, find

FILES = {
    "vllm/__init__.py": "from .deep import Moved as Public\n",
    "vllm/_version.py": "__version__ = version = '0.99.1'\n",
    "vllm/deep/__init__.py": "from .core import *\nfrom vllm.deep.core import helper as aid\n",
    "vllm/deep/core.py": """
import typing
import vllm.deep.base as bases
from typing import TYPE_CHECKING, overload
from vllm.deep.base import Base, Generic

if TYPE_CHECKING:
    def helper(): "for type checkers"

class Moved(Base, Generic[int]):
    @overload
    def many(self, x: int): ...
    @overload
    def many(self, x: str): ...
    def many(self, x):
        return x

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value): ...

    @classmethod
    def make(cls): ...

    @staticmethod
    def free(): ...

    limit: int = 3

    class Inner:
        def deep(self): ...

class Dotted(bases.Base): ...

def helper():
    return 1

try:
    from fast import speed
except ImportError:
    def speed():
        return "slow"

if True:
    def branch(): return 1
else:
    def branch(): return 2
""",
    "vllm/deep/base.py": """
class Root:
    def far(self): ...
class Base(Root):
    def near(self): ...
class Generic: ...
""",
}


@pytest.fixture(params=["tree", "wheel", "installed"])
def source(request, tmp_path: Path, monkeypatch):
    """The same files, read in each of the three ways."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if request.param == "tree":
        return Tree(tmp_path)
    if request.param == "wheel":
        wheel = tmp_path / "vllm-0.99.1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in FILES:
                archive.write(tmp_path / name, name)
        return Wheel(wheel)
    package = f"made_up_{tmp_path.name.replace('-', '_')}"
    (tmp_path / "vllm").rename(tmp_path / package)
    for file in (tmp_path / package).rglob("*.py"):
        file.write_text(file.read_text().replace("vllm.", f"{package}."))
    monkeypatch.syspath_prepend(tmp_path)

    class Renamed(Installed):
        def read(self, module):
            return super().read(module.replace("vllm", package, 1) if module.startswith("vllm") else module)

    return Renamed()


@pytest.mark.parametrize(
    ("module", "qualname", "where", "kind"),
    [
        ("vllm.deep.core", "helper", "helper", "function"),
        ("vllm.deep", "aid", "helper", "function"),
        ("vllm.deep", "helper", "helper", "function"),
        ("vllm", "Public", "Moved", "class"),
        ("vllm", "Public.many", "Moved.many", "function"),
        ("vllm.deep.core", "Moved.size", "Moved.size", "property"),
        ("vllm.deep.core", "Moved.make", "Moved.make", "classmethod"),
        ("vllm.deep.core", "Moved.free", "Moved.free", "staticmethod"),
        ("vllm.deep.core", "Moved.limit", "Moved.limit", "value"),
        ("vllm.deep.core", "Moved.Inner.deep", "Moved.Inner.deep", "function"),
        ("vllm.deep.core", "Moved.near", "Base.near", "function"),
        ("vllm.deep.core", "Moved.far", "Root.far", "function"),
        ("vllm.deep.core", "Dotted.far", "Root.far", "function"),
        ("vllm.deep.core", "speed", "speed", "function"),
    ],
)
def test_found(source, module, qualname, where, kind):
    """Through re-exports, stars, bases, overloads and branches."""
    found = find(source, module, qualname)
    assert found is not None
    assert (found.qualname, found.kind) == (where, kind)
    assert found.inherited == (where.split(".")[0] in ("Base", "Root"))


def test_text_and_fingerprint(source):
    """The text is for a person: with decorators, and all that belongs to the name."""
    size = find(source, "vllm.deep.core", "Moved.size")
    assert size.text.startswith("    @property\n    def size(self):")
    assert "@size.setter" in size.text
    many = find(source, "vllm.deep.core", "Moved.many")
    assert many.text == "    def many(self, x):\n        return x\n"
    assert many.line == FILES["vllm/deep/core.py"].splitlines().index("    def many(self, x):") + 1
    assert len(find(source, "vllm.deep.core", "branch").nodes) == 2


@pytest.mark.parametrize(
    ("module", "qualname"),
    [("vllm.gone", "f"), ("vllm.deep.core", "gone"), ("vllm.deep.core", "Moved.gone"), ("vllm.deep.core", "helper.x")],
)
def test_not_found(source, module, qualname):
    """No error: whoever asks says what it means."""
    assert find(source, module, qualname) is None


def test_versions(tmp_path, source):
    """As the package states it."""
    if not isinstance(source, Installed):
        assert source.version == "0.99.1"


def test_the_installed_vllm():
    """Nothing of it is imported, and re-exports of the real package are followed."""
    import subprocess
    import sys

    text = (
        "import sys\n"
        "from vllm_graft.sources import Installed, find\n"
        "one = find(Installed(), 'vllm.v1.core.sched.async_scheduler', 'AsyncScheduler.schedule')\n"
        "two = find(Installed(), 'vllm.config', 'VllmConfig.compute_hash')\n"
        "print(one.name, one.inherited, two.name, 'vllm' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "True",
        "vllm.config.vllm:VllmConfig.compute_hash",
        "False",
    ]


def test_bad_places(tmp_path):
    """A folder without vllm, and a file that is no wheel."""
    with pytest.raises(ConfigError, match=r"there is no folder 'vllm' in it. Next: name the folder above vllm/"):
        Tree(tmp_path)
    (tmp_path / "x.whl").write_text("no")
    with pytest.raises(ConfigError, match=r"it is not a wheel"):
        Wheel(tmp_path / "x.whl")
