"""Which functions are walked: each that may reach vLLM, and of a large package's few others."""

from __future__ import annotations

import pytest

from vllm_graft.audit.model import line_at
from vllm_graft.audit.uses import locate, read
from vllm_graft.audit.uses.package import PackageReader
from vllm_graft.audit.uses.values import local_defs


@pytest.fixture
def walked(write):
    """The functions of a package's module ``main`` whose bodies have been walked."""

    def walked(text, **modules):
        located = locate(write(text, **modules))
        package = PackageReader(located.package, located.files)
        package._walk_files()
        scope = next(file for file in located.files if file.name == "plug.main").scope
        owns = {name: own for name, value in scope.names.items() for own in local_defs(value)}
        for cls in [own for own in owns.values() if own.function is None]:
            owns |= {name: own for name, value in cls.inside.names.items() for own in local_defs(value)}
        return {name for name, own in owns.items() if own.function is not None and own.unwalked is None}

    return walked


def test_a_function_without_a_way_to_vllm_is_put_off(walked):
    text = """
        import torch
        from vllm.a import f

        def plain(x, y=1):
            total = torch.zeros(x)
            self.total = [one for one in total if one]
            return max(total, key=lambda one: one + y)

        def caller():
            return f()
        """
    assert walked(text) == {"caller"}


def test_a_function_in_a_docstring_is_none(walked):
    text = """
        from vllm.a import f

        def plain(x):
            '''Call it like this:

            def inner():
                return plain(1)
            '''
            return x
        """
    assert walked(text) == set()


@pytest.mark.parametrize(
    "body",
    [
        "return f()",
        "import vllm.b",
        "from . import other",
        "from plug.other import g",
        "return __import__('os')",
        "return importlib.import_module(name)",
        "return sys.modules[name]",
        "global f\n    f = 1",
        "def inner():\n        return 1\n    return inner",
        "class Inner:\n        pass\n    return Inner",
        "return self.model_config.x",
        "return vllm_config",
        "x: Later = 1",
        "return Mine()",
        "return module.g",
        "return TABLE['a']",
        "return NAME",
        "old = hasattr(x, 'y')\n    return old",
    ],
)
def test_every_way_to_vllm_calls_for_a_walk(walked, body):
    text = f"""
        import importlib, sys
        from typing import TYPE_CHECKING
        from vllm.a import f, Class
        from . import other as module
        if TYPE_CHECKING:
            from vllm.a import Later
        TABLE = {{"a": f}}
        NAME = "vllm.worker"
        class Mine(Class):
            pass

        def some(self, x):
            {body.replace(chr(10), chr(10) + "        ")}
        """
    assert walked(text, other="from vllm.a import g") == {"some"}


def test_methods_of_classes_that_derive_from_vllms_are_walked(walked):
    """They may call what they inherit."""
    text = """
        from vllm.a import Class
        from .other import Base

        class Mine(Base):
            def mine(self):
                return self.step(1)

        class Apart:
            def apart(self):
                return self.step(1)
        """
    assert walked(text, other="from vllm.a import Class\nclass Base(Class):\n    pass") == {"mine"}


def test_a_method_that_overwrites_a_test_kept_on_the_object_is_walked(walked):
    """What it was is not known any more."""
    text = """
        import vllm.a

        class Mine:
            def keep(self):
                self.has_x = hasattr(vllm.a, "x")

            def forget(self):
                self.has_x = 1

            def leave(self):
                self.other = 1
        """
    assert walked(text) == {"keep", "forget"}


def test_what_stands_in_the_place_of_a_name_is_walked_after_all(uses):
    """Its branches count, though no word of it speaks of vLLM."""
    inside = "\n".join(f"    x{number} = {number}" for number in range(30))
    other = f"def mine(self):\n{inside}\n    if hasattr(self, 'old'):\n        return self.old\n"
    (use,) = [
        use
        for use in uses("from vllm.a import Class\nfrom .other import mine\nClass.f = mine", other=other)
        if use.body
    ]
    assert [(line_at(first), line_at(last)) for _, first, last in use.branches] == [(33, 33)]


def test_a_function_put_off_may_be_too_deep(write):
    """Nothing is lost by it, and nothing said."""
    deep = " + ".join(["x"] * 900)
    reading = read(write(f"import vllm.a as m\ndef f(x):\n    return {deep}"))
    assert reading.unread == ()


def test_what_a_function_put_off_sets_is_the_packages_own(uses):
    """A read of it does not lean on vLLM."""
    text = """
        import vllm

        def f(thing):
            thing.of_mine = 1

        def g(vllm_config):
            return vllm_config.of_mine, vllm_config.model_config
        """
    reads = {use.path: use.own_attributes for use in uses(text) if use.way == "read"}
    assert reads == {("of_mine",): {"of_mine"}, ("model_config",): set()}
