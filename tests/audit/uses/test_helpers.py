"""Changes made by a function of the package that is given what to change."""

import pytest

CALLS = [
    ("def put(cls, name, value):\n    setattr(cls, name, value)", "put(Class, 'f', new)"),
    ("def put(value, *, cls, name='f'):\n    setattr(cls, name, value)", "put(new, cls=Class)"),
    ("def put(cls, value):\n    cls.f = value", "put(Class, new)"),
    ("def put(module, value):\n    module.Class.f = value", "put(m, new)"),
]


@pytest.mark.parametrize(("helper", "call"), CALLS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_helper(uses, helper, call, elsewhere):
    """The change stands where the helper is called, whichever file has it."""
    head = "import vllm.a as m\nfrom vllm.a import Class\ndef new(self): ...\n"
    if elsewhere:
        found = uses(f"{head}from .tools import put\n{call}", tools=helper)
    else:
        found = uses(f"{head}{helper}\n{call}")
    (use,) = [use for use in found if use.changes_vllm]
    assert (use.way, use.name, use.body.name, use.file) == ("replace", "vllm.a:Class.f", "new", "plug/main.py")
    assert use.line == 4 + (1 if elsewhere else len(helper.split("\n")))


def test_a_helper_that_wraps(puts):
    """The original that a helper keeps and hands on is seen."""
    text = """
        from vllm.a import Class
        def around(cls, name, make):
            original = getattr(cls, name)
            setattr(cls, name, make(original))
        around(Class, "f", make)
        around(Class, "g", make)
    """
    assert puts(text) == [("wrap", "vllm.a:Class.f"), ("wrap", "vllm.a:Class.g")]


def test_nothing_is_found_twice_or_for_nothing(puts):
    """A helper that changes what is not vLLM's, or nothing, is none."""
    text = """
        from vllm.a import Class
        def put(cls, value):
            cls.f = value
        def look(cls):
            return cls.f
        class Own: ...
        put(Own, 1)
        look(Class)
        put(*things)
    """
    assert puts(text) == []


def test_helpers_that_call_each_other(puts):
    """A circle ends."""
    text = """
        from vllm.a import Class
        def one(cls):
            cls.f = 1
            two(cls)
        def two(cls):
            cls.g = 1
            one(cls)
        one(Class)
    """
    assert sorted(puts(text)) == [("replace", "vllm.a:Class.f"), ("replace", "vllm.a:Class.g")]


def test_a_decorator_of_the_package_that_is_given_the_class(puts):
    text = """
    from vllm.a import C
    def on(cls, name=None):
        def decorate(fn):
            setattr(cls, name or fn.__name__, fn)
            return fn
        return decorate
    @on(C)
    def step(self): ...
    @on(C, "other")
    def mine(self): ...
    """
    assert puts(text) == [("replace", "vllm.a:C.step"), ("replace", "vllm.a:C.other")]


def test_the_names_of_a_class_put_on_another(puts):
    text = """
    from vllm.a import C
    class P:
        target = C
        def step(self): ...
    for name, value in P.__dict__.items():
        if callable(value):
            setattr(P.target, name, value)
    """
    assert ("replace", "vllm.a:C.step") in puts(text)


def test_a_class_that_pkgutil_resolves(puts):
    text = "import pkgutil\npkgutil.resolve_name('vllm.a:C').step = lambda self: None\n"
    assert puts(text) == [("replace", "vllm.a:C.step")]
