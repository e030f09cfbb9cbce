"""Constructors, abstract methods and configuration types, read from sources and from a catalogue alike."""

from __future__ import annotations

import inspect
import sys
from textwrap import dedent

import pytest

HEAD = """
import abc, dataclasses, enum, typing
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import ClassVar, NamedTuple
"""

CLASSES = {
    "written": "class C:\n    def __init__(self, a, b=1, *, c): ...",
    "inherited": "class B:\n    def __init__(self, a): ...\nclass C(B): ...",
    "nothing": "class C: ...",
    "abstract": "class B(ABC):\n    def __init__(self, a): ...\nclass C(B): ...",
    "dataclass": "@dataclass\nclass C:\n    a: int\n    b: str = ''\n    c: list = field(default_factory=list)",
    "left out": "@dataclass\nclass C:\n    a: int\n    n: ClassVar[int] = 1\n    x: int = field(init=False)",
    "keywords": "@dataclass(kw_only=True)\nclass C:\n    a: int\n    b: int = 1",
    "after a mark": "@dataclass\nclass C:\n    a: int\n    _: KW_ONLY\n    b: int",
    "one keyword": "@dataclass\nclass C:\n    a: int = field(kw_only=True)\n    b: int = 1",
    "derived": "@dataclass\nclass B:\n    a: int\n    b: int = 1\n@dataclass\nclass C(B):\n    a: int = 3",
    "mixed": "@dataclass(kw_only=True)\nclass B:\n    a: int\n@dataclass\nclass C(B):\n    c: int",
    "not its own": "@dataclass\nclass B:\n    a: int\nclass C(B):\n    c: int = 1",
    "own init": "@dataclass\nclass C:\n    a: int\n    def __init__(self, z): ...",
    "a diamond": (
        "class A:\n    def __init__(self, a): ...\nclass B(A): ...\n"
        "class D(A):\n    def __init__(self, d): ...\nclass C(B, D): ..."
    ),
    "a tuple": "class C(NamedTuple):\n    a: int\n    b: int = 1",
    "only for init": "@dataclass\nclass C:\n    a: InitVar[int]\n    b: 'int' = 1",
    "new": "class C:\n    def __new__(cls, a): return object.__new__(cls)",
}


def written(cls: type) -> tuple[str, ...]:
    marks = {"POSITIONAL_ONLY": "/", "KEYWORD_ONLY": "kw ", "VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return tuple(
        f"{marks.get(one.kind.name, '')}{one.name}{'' if one.default is one.empty else '='}"
        for one in inspect.signature(cls).parameters.values()
    )


@pytest.fixture(params=["source", "catalogue"])
def release(request, make, held):
    """release(text of vllm.m, ...) -> the release."""
    return lambda text, **more: held(request.param, make("1.0", m=dedent(text), **more))[0]


@pytest.mark.parametrize("text", CLASSES.values(), ids=list(CLASSES))
def test_a_constructor_takes_what_python_says(release, text):
    space: dict[str, object] = {"__name__": "vllm_made"}
    sys.modules["vllm_made"] = type(sys)("vllm_made")
    exec(compile(HEAD + text, "made", "exec", dont_inherit=True), space)
    assert release(HEAD + text).constructor("vllm.m", "C") == (written(space["C"]),)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nclass C(torch.nn.Module): ...",
        "from enum import Enum\nclass C(Enum):\n    A = 1",
        "from pydantic import BaseModel\nclass C(BaseModel):\n    a: int",
        "class C(make()): ...",
        "B = make()\nclass C(B): ...",
        "class C(metaclass=Odd):\n    def __init__(self, a): ...",
        "@odd\nclass C:\n    def __init__(self, a): ...",
        "class C:\n    @odd\n    def __init__(self, a): ...",
        "class C:\n    __init__ = odd",
        "if x:\n    class C:\n        def __init__(self, a): ...\nelse:\n    C = None\nclass D(C): ...",
    ],
)
def test_what_cannot_be_known_is_not_told(release, text):
    held = release(text)
    assert held.constructor("vllm.m", "D" if "class D" in text else "C") is None


def test_structs_of_msgspec_take_their_fields(release):
    text = (
        "import msgspec\nclass B(msgspec.Struct, frozen=True):\n    a: int\nclass C(B, kw_only=True):\n    b: int = 1"
    )
    assert release(text).constructor("vllm.m", "C") == (("a", "kw b="),)


def test_a_dataclass_of_pydantic_ignores_what_it_does_not_know_unless_it_is_told_to_forbid_it(release):
    lenient = "from pydantic.dataclasses import dataclass\n@dataclass\nclass C:\n    a: int"
    assert release(lenient).constructor("vllm.m", "C") == (("a", "**ignored"),)
    strict = lenient.replace("@dataclass", "@dataclass(config=ConfigDict(extra='forbid'))")
    assert release(strict).constructor("vllm.m", "C") == (("a",),)
    own = "from vllm.utils import config\n@config\nclass C:\n    a: int = Field(default=1)\n    b: int = Field(gt=0)"
    assert release(own).constructor("vllm.m", "C") == (("a=", "b"),)


def test_abstract_methods_are_those_that_python_asks_for(release):
    text = """
    from abc import ABC, abstractmethod
    class A(ABC):
        @abstractmethod
        def f(self): ...
        @property
        @abstractmethod
        def p(self): ...
    class B(A):
        def f(self): ...
    class Mixin:
        def p(self): ...
    class C(Mixin, B): ...
    class Free:
        @abstractmethod
        def f(self): ...
    """
    held = release(text)
    assert [held.abstract("vllm.m", name) for name in ("A", "B", "C", "Free")] == [{"f", "p"}, {"p"}, set(), set()]


def test_the_kind_of_a_function_is_the_one_that_callers_get(release):
    """What ``contextlib`` makes of a generator is a plain function; of what other decorators make nobody can tell."""
    found = release("""
        import contextlib, functools
        def plain(): return [(yield_ for yield_ in ()), lambda: (yield)]
        async def coroutine(): ...
        def generator(): yield 1
        async def async_generator(): yield 1
        @contextlib.contextmanager
        def managed(): yield 1
        @contextlib.asynccontextmanager
        async def managed_async(): yield 1
        @functools.cache
        def cached(): ...
        class C:
            @classmethod
            def generator(cls): yield from ()
            @property
            def shown(self): yield 1
    """)
    names = ["plain", "coroutine", "generator", "async_generator", "managed", "managed_async", "cached"]
    assert [found.shape("vllm.m", name).function for name in names] == [
        *("plain", "coroutine", "generator", "async generator", "plain", "plain", None)
    ]
    assert [found.shape("vllm.m", f"C.{name}").function for name in ("generator", "shown")] == ["generator", None]


def test_the_type_of_an_attribute_is_the_configuration_class_that_it_is_annotated_with(release):
    text = """
    from vllm.n import ModelConfig
    from dataclasses import dataclass
    @dataclass
    class VllmConfig:
        model_config: ModelConfig = None
        other_config: "ModelConfig | None" = None
        many: list[ModelConfig] = ()
    """
    held = release(text, n="class ModelConfig:\n    x: int")
    for name in ("model_config", "other_config"):
        assert held.config("vllm.m", "VllmConfig", name).name == "vllm.n:ModelConfig"
    assert held.config("vllm.m", "VllmConfig", "many") is None


def test_what_answers_for_attributes_besides_the_classes_of_vllm(release):
    text = "import torch\nclass B(torch.nn.Module): ...\nclass C(B):\n    def __getattr__(self, name): ..."
    assert release(text).outside("vllm.m", "C") == {"Module", "__getattr__"}
