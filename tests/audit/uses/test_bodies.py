"""What a body leans on besides the name itself."""

import pytest

from vllm_graft.audit.model import line_at
from vllm_graft.audit.uses import BodyDependencies, body_dependencies


def leaning(found, qualname):
    (use,) = [use for use in found if use.qualname == qualname and use.body is not None]
    relied = body_dependencies(use)
    return set(relied.attributes), set(relied.keywords)


def test_attributes_and_keywords_with_their_lines(uses):
    """What is read from self, and what is passed by name to the original, each at its first line."""
    text = """
        from vllm.a import Class
        orig = Class.f
        def f(self, n):
            self.mine = n
            if self.waiting and self.mine:
                self.running.pop()
            self.waiting
            return orig(self, n=n, key=self.table["x"], other=(
                1))
        Class.f = f
    """
    (use,) = [use for use in uses(text) if use.changes_vllm]
    relied = body_dependencies(use)
    assert {name: line_at(place) for name, place in relied.attributes.items()} == {
        "waiting": 5,
        "running": 6,
        "table": 8,
    }
    assert {name: line_at(place) for name, place in relied.keywords.items()} == {"n": 8, "key": 8, "other": 9}


@pytest.mark.parametrize(
    "called", ["call(x=1)", "original(x=1)", "self._original_f(x=1)", "super().f(x=1)", "await _orig_f(self, x=1)"]
)
def test_ways_to_call_the_original(uses, called):
    """A keyword passed on by any of them is leaned on."""
    text = f"class P(VLLMPatch['vllm.a:Class']):\n    async def f(self, call):\n        {called}\n        other(y=1)"
    assert leaning(uses(text), "Class.f")[1] == {"x"}


def test_another_method_of_the_base_is_not_the_original(uses):
    """Keywords belong to the method of the same name."""
    text = (
        "from vllm.a import Base\nclass Mine(Base):\n    def f(self):\n        super().g(y=1)\n        super().f(x=1)"
    )
    assert leaning(uses(text), "Base.f")[1] == {"x"}


def test_what_the_package_puts_there_itself(uses):
    """Names set by another hook, patched in, or defined by the subclass or its own base are the package's."""
    text = """
        from vllm.a import Base, Class
        class P(VLLMPatch["vllm.a:Class"]):
            def __init__(self, call):
                call()
                self.counter = 0
            def f(self):
                return self.counter, self.helper(), self.late, self.theirs
        def helper(self):
            setattr(self, "late", 1)
        Class.helper = helper

        class Mid(Base):
            def start(self):
                self.begun = 1
        class Mine(Mid):
            limit = 1
            def f(self):
                return self.limit, self.begun, self.g(), self.theirs
            def g(self): ...
    """
    found = uses(text)
    assert leaning(found, "Class.f")[0] == {"theirs"}
    assert leaning(found, "Base.f")[0] == {"theirs"}


def test_what_the_body_asks_for_first(uses):
    """hasattr and a default provide for an absence; getattr without one does not."""
    text = """
        from vllm.a import Class
        def f(self):
            hasattr(self, "a") and self.a
            getattr(self, "b", None)
            getattr(self, "c")
            self.__class__
            def inner(self):
                self.other
        Class.f = f
    """
    assert leaning(uses(text), "Class.f")[0] == {"c"}


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.a as m\ndef f(config):\n    config.x\nm.f = f",
        "from vllm.a import C\nclass Mine(C):\n    @staticmethod\n    def f(config):\n        config.x",
        "from vllm.a import C\nC.f = 3",
    ],
)
def test_no_object(uses, text):
    """A function of a module, a static method and a value are given no object of the class."""
    assert body_dependencies(uses(text)[-1]) == BodyDependencies({}, {})


def test_the_instance_of_a_wrapt_wrapper(uses):
    """wrapt hands the object over as ``instance``."""
    text = """
        import wrapt
        def w(wrapped, instance, args, kwargs):
            return wrapped(*args, x=instance.a, **kwargs)
        wrapt.wrap_function_wrapper("vllm.a", "C.f", w)
    """
    assert leaning(uses(text), "C.f") == ({"a"}, {"x"})
