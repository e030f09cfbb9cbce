"""Subclasses of vLLM's classes, and the methods that they define."""

import pytest

from vllm_graft.audit.uses.classes import OwnAttributes


def lines(found):
    return [(use.way, use.name, use.owner) for use in found if use.way in ("subclass", "override")]


def test_a_subclass_and_its_methods(uses):
    """One use for the class, one for each method and property; values and magic methods are left out."""
    text = """
        from vllm.a import Base
        class Mine(Base):
            limit = 1
            def __init__(self): ...
            def __repr__(self): ...
            def __call__(self): ...
            def run(self): ...
            async def wait(self): ...
            @property
            def size(self): ...
            @size.setter
            def size(self, value): ...
            @staticmethod
            def make(): ...
    """
    found = uses(text)
    assert lines(found) == [
        ("subclass", "vllm.a:Base", "Mine"),
        ("override", "vllm.a:Base.__init__", "Mine"),
        ("override", "vllm.a:Base.__call__", "Mine"),
        ("override", "vllm.a:Base.run", "Mine"),
        ("override", "vllm.a:Base.wait", "Mine"),
        ("override", "vllm.a:Base.size", "Mine"),
        ("override", "vllm.a:Base.make", "Mine"),
    ]
    size = next(use for use in found if use.qualname == "Base.size")
    assert size.source == "    @property\n    def size(self): ...\n"


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.a\nclass Mine(vllm.a.Base): ...",
        "from vllm.a import Base\nParent = Base\nclass Mine(Parent): ...",
        "from vllm.a import Base\nclass Mine(Base[int]): ...",
        "from vllm.a import Base\nclass Mine(Mixin, Base, metaclass=Meta): ...",
        "def make():\n    from vllm.a import Base\n    class Mine(Base): ...",
        "from vllm.a import Base\nclass Mine(Base if x else object): ...",
    ],
)
def test_ways_to_name_a_base(uses, text):
    """However the base is reached, it is one subclass."""
    assert [(way, name) for way, name, _ in lines(uses(text))] == [("subclass", "vllm.a:Base")]


def test_classes_between(uses):
    """A class between, also in another file that need not name vLLM, is looked through."""
    found = uses(
        "from plug.mid import Mid\nclass Leaf(Mid):\n    def run(self): ...",
        mid="from plug.base import Own\nclass Mid(Own): ...",
        base="from vllm.a import Base\nclass Own(Base): ...",
    )
    assert lines(found) == [
        ("subclass", "vllm.a:Base", "Own"),
        ("subclass", "vllm.a:Base", "Leaf"),
        ("override", "vllm.a:Base.run", "Leaf"),
        ("subclass", "vllm.a:Base", "Mid"),
    ]


def test_two_bases_of_vllm(uses):
    """Each base may lose what a method overrides."""
    found = uses("from vllm.a import A, B\nclass Mine(A, B):\n    def run(self): ...")
    assert [(way, name) for way, name, _ in lines(found)] == [
        ("subclass", "vllm.a:A"),
        ("subclass", "vllm.a:B"),
        ("override", "vllm.a:A.run"),
        ("override", "vllm.a:B.run"),
    ]


def test_a_base_that_is_mentioned_is_no_import(uses):
    """The base of a class counts as its base only."""
    found = uses("import vllm.a as m\nclass Mine(m.Base): ...")
    assert [(use.way, use.name) for use in found] == [("import", "vllm.a"), ("subclass", "vllm.a:Base")]


def test_methods_behind_a_test_of_the_version(uses):
    """A method that is defined for some releases only is guarded."""
    text = """
        from vllm.a import Base
        class Mine(Base):
            if VLLM_VERSION > 1:
                def new(self): ...
            def old(self): ...
    """
    assert {use.qualname: use.guarded for use in uses(text) if use.way == "override"} == {
        "Base.new": True,
        "Base.old": False,
    }


@pytest.mark.parametrize("base", ["Own", "object", "vllm_ascend.Base", "unknown.Base"])
def test_other_classes(uses, base):
    """What does not derive from vLLM is none."""
    assert lines(uses(f"import vllm.a, vllm_ascend\nclass Own: ...\nclass Mine({base}):\n    def f(self): ...")) == []


def test_a_base_from_one_place_or_another(uses):
    """Only one of the two need be there."""
    text = "try:\n    from vllm.a import Base\nexcept ImportError:\n    from vllm.b import Base\nclass Mine(Base): ..."
    found = [(use.name, use.guarded) for use in uses(text) if use.way == "subclass"]
    assert found == [("vllm.a:Base", True), ("vllm.b:Base", True)]


def test_a_method_that_is_assigned_is_an_override(uses):
    """It stands where it is assigned; its code may be in another file."""
    text = """
        from vllm.a import Base
        from .other import step, Helper
        class Mine(Base):
            step = step
            wait = staticmethod(lambda: None)
            kind = Helper
    """
    found = uses(text, other="\n\n\ndef step(self): ...\nclass Helper: ...")
    assert [(use.qualname, use.line) for use in found if use.way == "override"] == [("Base.step", 4), ("Base.wait", 5)]
    step = next(use for use in found if use.qualname == "Base.step")
    assert (step.file, step.body_file) == ("plug/main.py", "plug/other.py")
    assert step.source == "def step(self): ...\n"


def test_classes_of_the_packages_own_are_not_searched(uses, monkeypatch):
    """Their methods are most of a large package, and no call in them goes to vLLM."""
    asked = []
    of_class = OwnAttributes.of_class
    monkeypatch.setattr(OwnAttributes, "of_class", lambda own, cls: asked.append(cls.node.name) or of_class(own, cls))
    found = uses("""
        from vllm.a import Base
        class Own:
            def run(self):
                Base
                self.stop()
        class Mine(Base):
            def run(self):
                self.stop()
    """)
    assert [use.name for use in found if use.way == "call"] == ["vllm.a:Base.stop"]
    assert set(asked) == {"Mine"}
