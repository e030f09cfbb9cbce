"""What stands in the place of a name: the function, its text, and whether it calls what was there."""

from textwrap import dedent

import pytest

HEAD = "import functools\nfrom vllm.a import Class\nimport vllm.a as m\n"

WRAPS = [
    "orig = Class.f\ndef new(self):\n    return orig(self)\nClass.f = new",
    "orig = Class.f\nClass.f = lambda self: orig(self)",
    "_orig = m.func\ndef new():\n    return _orig()\nm.func = new",
    "def go():\n    orig = Class.f\n    def new(self):\n        return orig(self)\n    Class.f = new",
    "def new(self, _orig=Class.f):\n    return _orig(self)\nClass.f = new",
    "def new(self):\n    return self._orig_f()\nClass._orig_f = Class.f\nClass.f = new",
    "saved = {}\nsaved['f'] = Class.f\ndef new(self):\n    return saved['f'](self)\nClass.f = new",
    "orig = getattr(Class, 'f')\ndef new(self):\n    return orig(self)\nClass.f = new",
    "orig = Class.__dict__['f']\ndef new(cls):\n    return orig.__func__(cls)\nClass.f = classmethod(new)",
    "orig = Class.f\ndef new(self):\n    return orig.__get__(self)()\nClass.f = new",
    "orig = Class.f\nasync def new(self):\n    return await to_thread(orig, self)\nClass.f = new",
    "orig = Class.f\n@functools.wraps(orig)\ndef new(self):\n    return orig(self)\nsetattr(Class, 'f', new)",
    "def traced(f):\n    def inner(self):\n        return f(self)\n    return inner\nClass.f = traced(Class.f)",
    "def new(original, self): ...\nClass.f = functools.partialmethod(new, Class.f)",
    "class Mine:\n    _orig = Class.f\n    def f(self):\n        return Mine._orig(self)\nClass.f = Mine.f",
    "for n in ('f',):\n    def new(self, _o=getattr(Class, n)):\n        return _o(self)\n    setattr(Class, n, new)",
    "from vllm.a import func\ndef new():\n    return func()\nm.func = new",
]

REPLACES = [
    "def new(self): ...\nClass.f = new",
    "orig = Class.f\ndef new(self): ...\nClass.f = new",
    "orig = Class.g\ndef new(self):\n    return orig(self)\nClass.f = new",
    "orig = Class.f\n@functools.wraps(orig)\ndef new(self): ...\nClass.f = new",
    "orig = Class.f\ndef new(self):\n    orig = print\n    return orig(self)\nClass.f = new",
    "class Mine(m.Class):\n    def __init__(self):\n        super().__init__()\nm.Class = Mine",
    "Class.f = 3",
    "Class.f = imported_from_nowhere",
]


@pytest.mark.parametrize("text", WRAPS)
def test_a_call_of_what_was_there_wraps(uses, text):
    """However the original was kept, a function that calls it, or hands it on, wraps."""
    found = [use for use in uses(HEAD + text) if use.changes_vllm and "_orig" not in use.qualname]
    assert [use.way for use in found] == ["wrap"]


@pytest.mark.parametrize("text", REPLACES)
def test_everything_else_replaces(puts, text):
    """Keeping the original, or taking over its name, is no call."""
    assert [way for way, _ in puts(HEAD + text)] == ["replace"]


def change(found):
    (use,) = [use for use in found if use.changes_vllm]
    return use


def test_the_text_has_the_decorators(uses):
    """The source of a function is its lines, decorators included."""
    text = dedent("""
        from vllm.a import Class
        @first
        @second(1)
        def new(self):
            return 1  # why
        Class.f = new
    """)
    use = change(uses(text))
    assert use.source == "@first\n@second(1)\ndef new(self):\n    return 1  # why\n"
    assert (use.body.name, use.file, use.line) == ("new", "plug/main.py", 7 - 1)


def test_a_lambda(uses):
    """A nameless function is a body too."""
    use = change(uses("from vllm.a import Class\nClass.f = lambda self: 1"))
    assert (use.source, use.body.args.args[0].arg) == ("lambda self: 1", "self")


@pytest.mark.parametrize(
    "text",
    [
        "from .impl import new\nClass.f = new",
        "from plug.impl import new as other\nClass.f = other",
        "from . import impl\nClass.f = impl.new",
        "import plug.impl\nClass.f = plug.impl.new",
        "from .impl import Mine\nClass.f = Mine.new",
        "from .impl import make\nClass.f = make()",
        "from .impl import new\nClass.f = staticmethod(new)",
    ],
)
def test_a_function_of_another_file(uses, text):
    """A function imported from the package itself is found, and its text is that of its file."""
    impl = """
        def new(self):
            return "other file"
        class Mine:
            def new(self):
                return "other file"
        def make():
            def new(self):
                return "other file"
            return new
    """
    use = change(uses(f"from vllm.a import Class\n{text}", impl=impl))
    assert use.body.name == "new"
    assert "other file" in use.source
    assert use.file == "plug/main.py"


def test_a_class_in_the_place_of_a_class(uses):
    """A swapped class has its text and no body."""
    use = change(uses("import vllm.a as m\nclass Mine(m.Class):\n    x = 1\nm.Class = Mine\n"))
    assert (use.way, use.body, use.source) == ("replace", None, "class Mine(m.Class):\n    x = 1\n")


def test_owners(uses):
    """A use belongs to the class or function around it."""
    text = """
        from vllm.a import Class
        Class.a = 1
        def go():
            Class.b = 1
        class Box:
            def method(self):
                Class.c = 1
    """
    assert [use.owner for use in uses(text) if use.changes_vllm] == ["", "go", "Box.method"]
