"""All files together: what cannot be read, what need not be, and circles."""

from pathlib import Path

import pytest

from vllm_graft.audit.uses import locate, read
from vllm_graft.audit.uses.package import PackageReader


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"import vllm\ndef f(:\n", "plug/bad.py:2"),
        (b"import vllm  # \xff\n", "plug/bad.py"),
        (b"# coding: nonsense\nimport vllm\n", "plug/bad.py"),
        (b"import vllm\0\n", "plug/bad.py"),
        (b"import vllm\nx = " + b"-" * 5000 + b"1\n", "plug/bad.py"),
    ],
)
def test_a_file_that_cannot_be_read(write, data, where):
    """It is a finding with the place and the next step, and the rest of the package is read."""
    folder = write("from vllm.a import x")
    (folder / "bad.py").write_bytes(data)
    reading = read(folder)
    (finding,) = reading.unread
    assert (finding.code, finding.level, finding.subject) == ("P220", "error", "plug")
    assert finding.where.startswith(where)
    assert finding.what
    assert finding.fix
    assert [use.name for use in reading.uses] == ["vllm.a:x"]


def test_a_broken_file_that_does_not_name_vllm(write):
    """It has no uses, so nobody need read it."""
    folder = write("from vllm.a import x")
    (folder / "bad.py").write_text("def f(:")
    reading = read(folder)
    assert (reading.unread, reading.files) == ((), 3)


def test_a_file_that_cannot_be_opened(write, monkeypatch):
    """It is a finding like one that cannot be parsed."""
    folder = write("from vllm.a import x", closed="from vllm.a import y")
    opened = Path.read_bytes

    def refuse(path):
        if path.name == "closed.py":
            raise PermissionError(13, "not for you")
        return opened(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    reading = read(folder)
    assert [(one.code, one.where) for one in reading.unread] == [("P220", "plug/closed.py")]
    assert [use.name for use in reading.uses] == ["vllm.a:x"]


def test_a_file_is_searched_for_vllm_once(write, monkeypatch):
    """A large package has thousands of them."""
    folder = write("import vllm\n", other="x = 1\n")
    opened = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read_bytes(path))
    package = locate(folder)
    opened.clear()
    PackageReader(package.package, package.files)._walk_files()
    # Once for the word, and once for its imports, which may lead to vLLM.
    assert opened.count("other.py") == 2


def test_declared_encodings(write):
    """A file is read as Python reads it."""
    folder = write()
    (folder / "latin.py").write_bytes(b"# coding: latin-1\nimport vllm.a as m\nm.f = '\xe9'\n")
    (folder / "marked.py").write_bytes(b"\xef\xbb\xbfimport vllm.a as m\r\nm.g = 1\r\n")
    reading = read(folder)
    assert [use.name for use in reading.uses if use.changes_vllm] == ["vllm.a:f", "vllm.a:g"]
    assert reading.unread == ()


def test_circles_of_imports(puts):
    """Modules that import each other do not hang the reading."""
    found = puts(
        "from .one import Class\nClass.f = 1",
        one="from .two import Other\nfrom vllm.a import Class",
        two="from .one import Class\nOther = Class",
    )
    assert found == [("replace", "vllm.a:Class.f")]


def test_circles_of_names(puts):
    """A name that is bound to itself stands for nothing."""
    assert puts("from .one import x\nx.f = 1 # vllm", one="from .two import x", two="from .one import x") == []


def test_a_class_that_derives_from_itself(uses):
    """Nonsense is read without a word."""
    assert uses("import vllm\nclass A(A): ...\nclass B(C): ...\nclass C(B): ...") == []


def test_long_chains_of_imports(puts):
    """A name handed on through many modules is found."""
    modules = {f"m{n}": f"from .m{n + 1} import Class  # vllm" for n in range(60)}
    assert puts("from .m0 import Class\nClass.f = 1  # vllm", **modules, m60="from vllm.a import Class") == [
        ("replace", "vllm.a:Class.f")
    ]


def test_uses_come_in_the_order_of_files_and_lines(uses):
    """Whatever imports what."""
    found = uses("from .zz import Class\nClass.f = 1", zz="from vllm.a import Class\nClass.g = 1", aa="import vllm.b")
    assert [use.where for use in found] == ["plug/aa.py:1", "plug/main.py:2", "plug/zz.py:1", "plug/zz.py:2"]


def test_circles_of_names_in_functions(write):
    """They are looked at last, and hang the reading no more than the rest."""
    circle = {"one": "from .two import x", "two": "from .one import x"}
    reading = read(write("from .one import x\ndef f():\n    x.f = 1 # vllm", **circle))
    assert (reading.uses, reading.unread) == ((), ())


@pytest.mark.parametrize(
    "text", ["x = {sum}", "def f(x):\n    y = m.g + {sum}", "def f(x):\n    return x{calls}\nm.f = f"]
)
def test_code_too_deep_to_follow_is_said(write, text):
    """The file is named, wherever in it the expression stands; nothing breaks off."""
    deep = text.format(sum=" + ".join(["x"] * 900), calls=".a()" * 700)
    reading = read(write(f"import vllm.a as m\n{deep}", other="import vllm.b as m\nm.g = 1"))
    assert {finding.where for finding in reading.unread} == {"plug/main.py"}
    assert ("replace", "vllm.b:g") in [(use.way, use.name) for use in reading.uses]
