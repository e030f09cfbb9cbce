"""Assignments and deletions that change vLLM."""

import pytest

SCHEDULE = ("replace", "vllm.a.b:Class.attr")


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.a.b as m\nm.Class.attr = f",
        "import vllm.a.b\nvllm.a.b.Class.attr = f",
        "from vllm.a.b import Class\nClass.attr = f",
        "from vllm.a.b import Class as C\nx = C.attr = f",
        "from vllm.a.b import Class\nx, Class.attr = 1, f",
        "from vllm.a.b import Class\n[Class.attr, *rest] = f",
        "from vllm.a.b import Class\nClass.attr: object = f",
        "from vllm.a.b import Class\nClass.attr += [1]",
        "import vllm.a.b as m\nTarget = m.Class\nTarget.attr = f",
        "import vllm.a.b\nb = vllm.a.b\nb.Class.attr = f",
        "def go():\n    from vllm.a.b import Class\n    Class.attr = f",
        "from importlib import import_module\nm = import_module('vllm.a.b')\nm.Class.attr = f",
        "import importlib\nimportlib.import_module('.b', package='vllm.a').Class.attr = f",
        "import sys\nsys.modules['vllm.a.b'].Class.attr = f",
        "import sys\nsys.modules.get('vllm.a.b').Class.attr = f",
        "import vllm.a.b\n__import__('vllm.a.b').a.b.Class.attr = f",
        "__import__('vllm.a.b', fromlist=['Class']).Class.attr = f",
        "from vllm.a.b import Class\nClass.__dict__['attr'] = f",
        "import vllm.a.b as m\nvars(m.Class)['attr'] = f",
        "from vllm.a.b import Class\nClass.attr.__code__ = f.__code__",
        "from vllm.a.b import Class\nif (C := Class):\n    C.attr = f",
        "import vllm.a.b as m\ngetattr(m, 'Class').attr = f",
        "import vllm.a.b as m\nwith open('x') as n:\n    m.Class.attr = f",
        "NAME = 'vllm.a.' + 'b'\nimport sys\nsys.modules[NAME].Class.attr = f",
        "import wrapt\n@wrapt.when_imported('vllm.a.b')\ndef hook(module):\n    module.Class.attr = f",
    ],
)
def test_ways_to_assign(puts, text):
    """However the class is reached, one use is found, and it has the module that import statements show."""
    assert puts(text) == [SCHEDULE]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import vllm.a.b as m\nm.func = f", "vllm.a.b:func"),
        ("import vllm.a.b as m\nclass Mine(m.Class): ...\nm.Class = Mine", "vllm.a.b:Class"),
        ("import vllm.a.b as m\nm.__dict__['func'] = f", "vllm.a.b:func"),
        ("import sys\nsys.modules['vllm.a'] = other", "vllm.a"),
        ("from vllm.a import b\nb.Class.attr = f", "vllm.a:b.Class.attr"),
        ("from vllm.a import b\nfrom vllm.a.b import Class\nb.Class.attr = f", "vllm.a.b:Class.attr"),
        ("import vllm\nvllm.LLM.generate = f", "vllm:LLM.generate"),
    ],
)
def test_functions_classes_and_modules(puts, text, name):
    """Names in a module and modules themselves are found as well as attributes of classes."""
    assert puts(text) == [("replace", name)]


@pytest.mark.parametrize("text", ["del Class.attr", "delattr(Class, 'attr')", "type.__delattr__(Class, 'attr')"])
def test_deletion(puts, text):
    """A name taken away is a use of its own kind."""
    assert puts(f"from vllm.a.b import Class\n{text}") == [("delete", "vllm.a.b:Class.attr")]


@pytest.mark.parametrize(
    "text",
    [
        "import vllm_ascend.a as m\nm.Class.attr = f",
        "from vllm.a import Class\nclass Class: ...\nClass.attr = f",
        "from vllm.a import Class\ndef go(Class):\n    Class.attr = f",
        "from vllm.a import Class\ndef go():\n    Class.attr = f\n    Class = 1",
        "def one():\n    from vllm.a import Class\ndef two():\n    Class.attr = f",
        "class Box:\n    from vllm.a import Class\n    def go(self):\n        Class.attr = f",
        "from vllm.a import Class\nthing = Class()\nthing.attr = f",
        "from vllm.a import Class\nself.Class = Class",
        "from vllm.a import Class\n[Class.attr for Class in things]",
        "from vllm.a import table\ntable['key'] = f",
        "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from vllm.a import Class\nClass.attr = f",
    ],
)
def test_what_is_no_change_of_vllm(puts, text):
    """Names of other packages, names bound anew, other scopes, and objects made of a class."""
    assert puts(text) == []


def test_alternatives_are_all_found_and_guarded(uses):
    """A class imported from one place or another is changed at either, and only one of them need be there."""
    found = uses("""
        try:
            from vllm.new import Class
        except ImportError:
            from vllm.old import Class
        Class.attr = f
    """)
    changes = [(use.name, use.guarded) for use in found if use.changes_vllm]
    assert changes == [("vllm.new:Class.attr", True), ("vllm.old:Class.attr", True)]


def test_global_and_nonlocal_names(puts):
    """A function may bind names of the scopes around it."""
    text = """
        Class = Other = None
        def load():
            global Class
            from vllm.a import Class
        def go():
            Other = None
            def inner():
                nonlocal Other
                from vllm.a import Other
            Other.attr = f
            Class.attr = f
    """
    assert ("replace", "vllm.a:Class.attr") in puts(text)


def test_names_re_exported_by_the_package(puts):
    """A module of the package that hands on a class of vLLM is looked through, also where a file does not name vLLM."""
    assert puts(
        "from .compat import Scheduler\nfrom plug import compat\nScheduler.a = f\ncompat.Scheduler.b = f",
        compat="from vllm.x import Scheduler",
    ) == [("replace", "vllm.x:Scheduler.a"), ("replace", "vllm.x:Scheduler.b")]


def test_changing_a_module_of_the_package(puts):
    """The package's own module is not vLLM's, whatever it holds."""
    assert puts("from plug import compat\ncompat.Scheduler = f", compat="from vllm.x import Scheduler") == []
