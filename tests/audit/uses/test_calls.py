"""Calls that change vLLM: setattr, mock, pytest, wrapt, gorilla."""

import pytest

HEAD = "import vllm.a.b as m\nfrom vllm.a.b import Class\n"


@pytest.mark.parametrize(
    "text",
    [
        "setattr(Class, 'attr', f)",
        "NAME = 'attr'\nsetattr(Class, NAME, f)",
        "type.__setattr__(Class, 'attr', f)",
        "from unittest.mock import patch\nwith patch('vllm.a.b.Class.attr'): ...",
        "from unittest import mock\n@mock.patch('vllm.a.b.Class.attr', new=f)\ndef test(): ...",
        "import unittest.mock\nunittest.mock.patch.object(Class, 'attr', f).start()",
        "from unittest.mock import patch\npatch.multiple('vllm.a.b.Class', attr=f)",
        "def test(mocker):\n    mocker.patch.object(m.Class, 'attr')",
        "def test(monkeypatch):\n    monkeypatch.setattr(Class, 'attr', f)",
        "def test(monkeypatch):\n    monkeypatch.setattr('vllm.a.b.Class.attr', f)",
        "import gorilla\ngorilla.apply(gorilla.Patch(Class, 'attr', f))",
        "import gorilla\n@gorilla.patch(Class)\ndef attr(self): ...",
        "import gorilla\n@gorilla.patch(Class, name='attr')\ndef other(self): ...",
        "import gorilla\n@gorilla.patches(Class)\nclass Mine:\n    def attr(self): ...",
        "import wrapt\ndef w(wrapped, instance, args, kwargs): ...\nwrapt.wrap_function_wrapper(m, 'Class.attr', w)",
    ],
)
def test_one_change(puts, text):
    """Each form gives one use of the attribute."""
    assert puts(HEAD + text) == [("replace", "vllm.a.b:Class.attr")]


@pytest.mark.parametrize(
    "text",
    [
        "for name in ('one', 'two'):\n    setattr(Class, name, f)",
        "NAMES = ['one', 'two']\nfor name in NAMES:\n    setattr(Class, name, f)",
        "for name, value in {'one': f, 'two': g}.items():\n    setattr(Class, name, value)",
        "for name in {'one': f, 'two': g}:\n    setattr(Class, name, f)",
        "for name, value in [('one', f), ('two', g)]:\n    setattr(Class, name, value)",
        "for name, value in zip(('one', 'two'), (f, g)):\n    setattr(Class, name, value)",
        "for end in ('e', 'o'):\n    ...\nfor name in ('one', 'two'):\n    setattr(Class, f'{name}', f)",
    ],
)
def test_loops_over_names(puts, text):
    """A loop over names that are spelled out gives a use for each."""
    assert puts(HEAD + text) == [("replace", "vllm.a.b:Class.one"), ("replace", "vllm.a.b:Class.two")]


def test_loop_over_classes(puts):
    """And so does a loop over the things to be changed."""
    text = "from vllm.a import A, B\nfor cls in (A, B):\n    cls.attr = f"
    assert puts(text) == [("replace", "vllm.a:A.attr"), ("replace", "vllm.a:B.attr")]


def test_each_turn_of_a_loop_has_its_own_value(uses):
    """The function is the one that belongs to the name."""
    found = uses(
        f"{HEAD}def f(self): ...\ndef g(self): ...\nfor n, v in (('f', f), ('g', g)):\n    setattr(Class, n, v)"
    )
    assert [(use.qualname, use.body.name) for use in found if use.changes_vllm] == [("Class.f", "f"), ("Class.g", "g")]


def test_wrapt_around_a_call(puts):
    """A wrapper that calls what it was given wraps; the module may be a string, and deferred."""
    text = """
        import wrapt

        def traced(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper("vllm.a.b", "Class.one", traced)
        wrapt.wrap_function_wrapper(module="vllm.a.b?", name="Class.two", wrapper=traced)

        @wrapt.patch_function_wrapper("vllm.a.b", "Class.three")
        def three(func, instance, args, kwargs):
            return func(*args, **kwargs)
    """
    assert puts(text) == [("wrap", f"vllm.a.b:Class.{name}") for name in ("one", "two", "three")]


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("def test(monkeypatch):\n    monkeypatch.setitem(sys.modules, 'vllm.a', fake)", "replace"),
        ("def test(monkeypatch):\n    monkeypatch.delitem(sys.modules, 'vllm.a')", "delete"),
        ("from unittest.mock import patch\npatch.dict('sys.modules', {'vllm.a': fake})", "replace"),
        ("from unittest.mock import patch\npatch.dict(sys.modules, {'vllm.a': fake})", "replace"),
    ],
)
def test_modules_in_tests(puts, text, way):
    """A module put in the place of vLLM's by a test's own means."""
    assert puts(f"import sys\n{text}") == [(way, "vllm.a")]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("vllm.a.b.func", "vllm.a.b:func"),
        ("vllm.a.b._Class.attr", "vllm.a.b:_Class.attr"),
        ("vllm.LLM", "vllm:LLM"),
    ],
)
def test_dotted_names(puts, path, name):
    """A class is told from a module by its capital, and without one the last part is the name."""
    assert puts(f"from unittest.mock import patch\npatch({path!r})") == [("replace", name)]


@pytest.mark.parametrize(
    "text",
    [
        "setattr(self, 'attr', f)",
        "setattr(Class(), 'attr', f)",
        "from unittest.mock import patch\npatch('vllm_ascend.x.Class.attr')",
        "from unittest.mock import patch\npatch('os.path.join')",
        "from functools import partial as patch\npatch('vllm.a.b.Class.attr')",
        "def setattr(*args): ...\nsetattr(Class, 'attr', f)",
        "hasattr(Class, 'attr') or getattr(Class, 'attr')",
    ],
)
def test_what_is_no_change(puts, text):
    """Other objects, other packages, and other functions of the same name."""
    assert puts(HEAD + text) == []
