"""Names of vLLM that a package imports or mentions."""

import pytest


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from vllm.a import x, y as z", ["vllm.a:x", "vllm.a:y"]),
        ("from vllm.a import *", ["vllm.a"]),
        ("import vllm.a.b as m", ["vllm.a.b"]),
        ("import vllm", []),
        ("import vllm\nvllm.LLM()", ["vllm:LLM"]),
        ("import vllm\nvllm.envs.VLLM_X", ["vllm:envs.VLLM_X"]),
        ("import vllm.envs\nvllm.envs.VLLM_X.lower()", ["vllm.envs", "vllm.envs:VLLM_X"]),
        ("import vllm.envs as envs\nenvs.VLLM_X", ["vllm.envs", "vllm.envs:VLLM_X"]),
        (
            "from vllm import envs\nenvs.VLLM_X\nenvs.table.get(1)",
            ["vllm:envs", "vllm:envs.VLLM_X", "vllm:envs.table.get"],
        ),
        ("import vllm.a as m\nm.Class.make().other", ["vllm.a", "vllm.a:Class.make"]),
        ("import vllm.a as m\nm.State.DONE.value", ["vllm.a", "vllm.a:State.DONE"]),
        ("import vllm.a as m\nm.Class.__name__\nm.__file__", ["vllm.a", "vllm.a:Class"]),
        ("import vllm.a as m\nm.func.cache_clear()", ["vllm.a", "vllm.a:func.cache_clear"]),
        ("import vllm.a as m\ndef f(x: m.Class) -> m.Other: ...", ["vllm.a", "vllm.a:Class", "vllm.a:Other"]),
        ("import vllm.a as m\n@m.decorate\ndef f(x=m.DEFAULT): ...", ["vllm.a", "vllm.a:DEFAULT", "vllm.a:decorate"]),
        ("import vllm.a as m\n[m.f(x) for x in m.y if (lambda: m.z)]", ["vllm.a", "vllm.a:y", "vllm.a:f", "vllm.a:z"]),
        (
            "from vllm.a import b\nb.Class\nb.LIMIT\nb.f()",
            ["vllm.a:b", "vllm.a:b.Class", "vllm.a:b.LIMIT", "vllm.a:b.f"],
        ),
        ("from vllm.a import Class\nClass.Inner\nClass.f()", ["vllm.a:Class", "vllm.a:Class.Inner", "vllm.a:Class.f"]),
        ("import vllm.a as m\norig = m.Class.f", ["vllm.a", "vllm.a:Class.f"]),
        ("import importlib\nimportlib.import_module('vllm.a').x", ["vllm.a:x", "vllm.a"]),
        ("import sys\nsys.modules['vllm.a']", ["vllm.a"]),
        ("import vllm.a as m\ngetattr(m, 'x')", ["vllm.a", "vllm.a:x"]),
    ],
)
def test_mentions(imports, text, names):
    """Imports give the name as they spell it, and a chain of attributes on a module gives the name in it."""
    assert sorted(name for _, name in imports(text)) == sorted(names)


@pytest.mark.parametrize(
    "text",
    [
        "import vllm_ascend.a\nvllm_ascend.a.x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.a import x",
        "import typing\nif typing.TYPE_CHECKING:\n    import vllm.a as m\nm.x",
        "'from vllm.a import x'",
        "def f(vllm):\n    vllm.LLM()",
    ],
)
def test_what_is_no_mention(imports, text):
    """Other packages, what only a type checker reads, strings, and parameters of that name."""
    assert imports(f"# vllm\n{text}") == []


def test_one_use_for_each_name(imports):
    """A name that stands in several places is one use, at the first line."""
    assert imports("import vllm.a as m\ndef f():\n    m.x\n\nm.x\nfrom vllm.a import x\n") == [
        (1, "vllm.a"),
        (3, "vllm.a:x"),
    ]


def test_what_is_changed_is_not_mentioned(imports):
    """The target of a change counts as the change only."""
    text = "import vllm.a as m\nm.Class.f = 1\nsetattr(m.Class, 'g', 1)\ndel m.x"
    assert imports(text) == [(1, "vllm.a")]


def test_a_name_asked_for_with_a_default_is_guarded(uses):
    """The code provides for its absence."""
    found = uses("import vllm.a as m\ngetattr(m, 'x', None)\nm.y if hasattr(m, 'y') else 0\nm.z")
    assert {use.qualname: use.guarded for use in found} == {"": False, "x": True, "y": True, "z": False}
