"""Arguments fit a signature exactly where Python itself would bind them."""

from __future__ import annotations

import ast
import inspect
import itertools
from textwrap import dedent

import pytest

from vllm_graft.audit.compatibility import explain_misfit
from vllm_graft.audit.model import Arguments
from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import read
from vllm_graft.sources.fingerprint import signature

SIGNATURES = [
    "", "a", "a, b", "a, b=1", "a=1, b=2", "a, /, b", "a, /", "a=1, /", "*args", "a, *args", "*, k", "a, *, k=1",
    "a, *args, k", "**kwargs", "a, **kwargs", "a, /, **kwargs", "*args, **kwargs", "a, b=1, *args, k, m=2, **rest",
]  # fmt: skip
NAMES = ("a", "b", "k", "z")


def tokens(parameters: str) -> tuple[str, ...]:
    return signature(ast.parse(f"def f({parameters}): ...").body)[1:]


@pytest.mark.parametrize("parameters", SIGNATURES)
def test_a_call_fits_where_python_binds_it(parameters):
    space: dict[str, object] = {}
    exec(f"def f({parameters}): ...", space)
    bound = inspect.signature(space["f"])
    for count in range(4):
        for size in range(4):
            for names in itertools.combinations(NAMES, size):
                try:
                    bound.bind(*range(count), **dict.fromkeys(names))
                    fits = True
                except TypeError:
                    fits = False
                said = explain_misfit(Arguments(count, names), tokens(parameters))
                assert (said == "") is fits, f"f({count} arguments, {names}) of f({parameters}): {said!r}"


@pytest.mark.parametrize(
    ("call", "parameters", "said"),
    [
        ("f(*x)", "a, b", ""),
        ("f(*x)", "a, *, k", "it needs 'k'"),
        ("f(**x)", "a, *, k", ""),
        ("f(1, 2, *x)", "a", "it takes 1 argument by position, 2 are given"),
        ("f(z=1, **x)", "a", "it takes no 'z'"),
        ("f(*x, a=1)", "a, b", ""),
        ("f(1, a=2)", "a", "'a' is given by position and by keyword"),
        ("f()", "a, b, c", "it needs 'a', 'b' and 'c'"),
        ("f(1)", "", "it takes no arguments by position, 1 is given"),
    ],
)
def test_what_is_unpacked_may_hold_anything(call, parameters, said):
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert explain_misfit(Arguments.of(node), tokens(parameters)) == said


def test_a_call_of_a_function_that_still_fits_is_no_finding(findings):
    package = "from vllm.m import f\nf(1, b=2)\n"
    assert findings(package, "def f(a, b): ...", "def f(a, c=3, *, b): ...") == []


def test_a_call_that_cannot_bind_is_an_error_where_it_stands(findings):
    package = "from vllm.m import f\nf(1)\nf(1, b=2)\n"
    assert findings(package, "def f(a, b=1): ...", "def f(a): ...") == [("P215", "error", 3)]


def test_a_function_that_is_handed_on_may_be_called_in_any_way(findings):
    package = "from vllm.m import f\nregister(f)\n"
    assert findings(package, "def f(a): ...", "def f(b): ...") == [("P202", "warning", 1)]


def test_a_function_that_is_only_imported_is_no_finding(findings):
    assert findings("from vllm.m import f\n", "def f(a): ...", "def f(b): ...") == []


def test_a_call_through_another_name_is_followed(findings):
    package = "import vllm.m as m\ng = m.f\ng(1, 2)\n"
    assert findings(package, "def f(a, b): ...", "def f(a): ...") == [("P215", "error", 3)]


def test_what_is_applied_already_is_not_counted_twice(findings):
    package = "import functools\nfrom vllm.m import f\ng = functools.partial(f, 1)\ng(2)\n"
    assert findings(package, "def f(a, b): ...", "def f(a, b): ...") == []


@pytest.mark.parametrize(
    ("old", "new", "call"),
    [
        ("def __init__(self, a, skip=()): ...", "def __init__(self, a): ...", "C(1, skip=2)"),
        ("def __init__(self, a): ...", "def __init__(self, a, b): ...", "C(1)"),
        ("@classmethod\n    def make(cls, a): ...", "@classmethod\n    def make(cls): ...", "C.make(1)"),
        ("def go(self, a): ...", "def go(self): ...", "C.go(x, 1)"),
        ("def go(self, a): ...", "def go(self): ...", "C().go(1)"),
        ("@staticmethod\n    def go(a): ...", "@staticmethod\n    def go(): ...", "C.go(1)"),
    ],
)
def test_constructions_and_methods(findings, old, new, call):
    classes = [f"class C:\n    {text}" for text in (old, new)]
    assert findings(f"from vllm.m import C\n{call}\n", *classes) == [("P215", "error", 2)]


def test_a_dataclass_whose_fields_changed(findings):
    head = "from dataclasses import dataclass\n@dataclass\nclass T:\n    size: int\n"
    package = "from vllm.m import T\nT(size=1, shared_by=[])\n"
    assert findings(package, f"{head}    shared_by: list", f"{head}    layers: list") == [("P215", "error", 2)]


def test_a_call_in_a_try_that_catches_it_is_information(findings):
    old, new = "def f(a, b=1): ...", "def f(a): ..."
    package = "from vllm.m import f\ntry:\n    f(1, b=2)\nexcept {}:\n    f(1)\n"
    assert findings(package.format("TypeError"), old, new) == [("P215", "info", 3)]
    assert findings(package.format("ImportError"), old, new) == [("P215", "error", 3)]


OLD = """
class Engine:
    def __init__(self, a): self.queue = []
    def step(self, batch): ...
    def pick(self): ...
"""


def test_calls_on_self_and_super_in_any_method_of_a_subclass(findings):
    package = """
    from vllm.m import Engine
    class Mine(Engine):
        def __init__(self, a, b):
            super().__init__(a, b)
        def helper(self):
            self.step(1, 2)
            return self.pick()
        def run(self):
            return self.queue
    """
    new = OLD.replace("def pick(self): ...", "").replace("self.queue", "self.waiting").replace("batch", "batch, x, y")
    assert set(findings(package, OLD, new)) - {("P203", "info", 3)} == {
        ("P215", "error", 4), ("P215", "error", 6), ("P210", "error", 7), ("P210", "error", 9),
    }  # fmt: skip


def test_methods_that_the_package_has_itself_are_its_own(findings):
    package = """
    from vllm.m import Engine
    class Mixin:
        def pick(self, a, b): ...
    class Mine(Mixin, Engine):
        def step(self, batch, more=None): ...
        def helper(self):
            self.step(1, 2)
            self.pick(1, 2)
            super().pick(1, 2)
            self.queue(1)
    """
    assert findings(package, OLD, OLD) == []


def test_a_method_above_that_is_gone(findings):
    package = "from vllm.m import Engine\nclass Mine(Engine):\n    def go(self):\n        super().pick()\n"
    assert ("P201", "error", 4) in findings(package, OLD, OLD.replace("pick", "choose"))


READS = "from vllm.m import Engine\nkeep = Engine.pick\n"


def test_an_attribute_of_an_imported_class(findings):
    assert findings(READS, OLD, OLD) == []
    assert findings(READS, OLD, OLD.replace("pick", "choose")) == [("P201", "error", 2)]
    assert findings("from vllm.m import Engine\nEngine.queue\nEngine.__name__\n", OLD, "class Engine: ...") == []


ABSTRACT = """
from abc import ABC, abstractmethod
class Base(ABC):
    @abstractmethod
    def go(self): ...
"""
STRICTER = ABSTRACT + "    @abstractmethod\n    def stop(self): ...\n"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("class C(Base):\n    def go(self): ...", [("P216", "error", 3)]),
        ("class C(Base):\n    def go(self): ...\n    def stop(self): ...", []),
        ("class C(Base, ABC):\n    def go(self): ...", []),
        ("class C(Base):\n    @abstractmethod\n    def go(self): ...", []),
        ("class M:\n    def stop(self): ...\nclass C(M, Base):\n    def go(self): ...", []),
        ("class C(unknown, Base):\n    def go(self): ...", []),
        ("class C(Base):\n    def go(self): ...\nclass D(C):\n    def stop(self): ...", []),
        ("class C(Base):\n    def go(self): ...\nclass D(C): ...", [("P216", "error", 5)]),
    ],
)
def test_a_new_abstract_method(findings, body, found):
    package = f"from abc import ABC, abstractmethod\nfrom vllm.m import Base\n{body}\n"
    assert findings(package, ABSTRACT, STRICTER) == found
    assert findings(package, ABSTRACT, ABSTRACT) == []


def config(*fields: str) -> dict[str, str]:
    body = "".join(f"    {field}: int = 1\n" for field in fields)
    model = f"from dataclasses import dataclass\n@dataclass\nclass ModelConfig:\n    model: str = ''\n{body}"
    whole = (
        "from dataclasses import dataclass\nfrom vllm.config.model import ModelConfig\n"
        "def get_current_vllm_config(): ...\n"
        "@dataclass\nclass VllmConfig:\n    model_config: ModelConfig = None\n"
    )
    return {"config.model": model, "config": whole, "m": OLD}


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.config import VllmConfig\ndef f(c: VllmConfig):\n    return c.model_config.routed",
        "from vllm.config import VllmConfig\ndef f(c: 'VllmConfig | None' = None):\n    return c.model_config.routed",
        "import vllm.config\ndef f(c: vllm.config.VllmConfig):\n    return c.model_config.routed",
        "from vllm.config import get_current_vllm_config as get\ndef f():\n    return get().model_config.routed",
        "from vllm.m import Engine\ndef f(config):\n    return config.model_config.routed",
        "from vllm.m import Engine\ndef f(model_config):\n    return model_config.routed",
        "from vllm.m import Engine\nclass M(Engine):\n    def f(self): return self.vllm_config.model_config.routed",
        "from vllm.m import Engine\nclass M(Engine):\n    def f(self): return self.model_config.routed",
        "import vllm.m\ndef f(vllm_config): m = vllm_config.model_config; \\\n    return m.routed",
        "from vllm.config import VllmConfig\ndef f(c: VllmConfig):\n    return getattr(c.model_config, 'routed')",
    ],
)
def test_a_removed_field_of_a_configuration(findings, text):
    assert findings(text, config("routed"), config()) == [("P217", "error", 3)]
    assert findings(text, config("routed"), config("routed")) == []


def test_a_field_is_missed_where_the_package_stores_its_configuration(findings):
    """``self.model_config = ...``, which most plugins have somewhere, says nothing about the fields in it."""
    text = """
    from vllm.config import VllmConfig
    class Mine:
        def __init__(self, vllm_config: VllmConfig):
            self.model_config = vllm_config.model_config
        def f(self):
            return self.model_config.routed
    def g(vllm_config: VllmConfig):
        return vllm_config.model_config.routed
    """
    assert findings(text, config("routed"), config()) == [("P217", "error", 6), ("P217", "error", 8)]
    own = "from vllm.config.model import ModelConfig\nclass Own(ModelConfig):\n    routed: int = 1\n"
    whole = "from vllm.config import VllmConfig\ndef f(c: VllmConfig):\n    return c.model_config.routed\n"
    assert findings(own + whole, config("routed"), config()) == []


def test_an_annotation_that_only_type_checkers_can_read(findings):
    text = """
    from typing import TYPE_CHECKING
    import vllm.m
    if TYPE_CHECKING:
        from vllm.config import VllmConfig
    def f(c: "VllmConfig"):
        return c.model_config.routed
    """
    assert findings(text, config("routed"), config()) == [("P217", "error", 6)]


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.m\ndef f(model_config):\n    return getattr(model_config, 'routed', None)",
        "import vllm.m\ndef f(model_config):\n    model_config.routed = 1\n    return model_config.routed",
        "import vllm.m\ndef f(model_config):\n    return model_config.never_there",
        "import vllm.m\ndef f(model_config):\n    model_config = {}\n    return model_config.routed",
        "import vllm.m\ndef f(hf_config):\n    return hf_config.routed",
        "import vllm.m\ndef f(x):\n    return x.model_config['routed']",
    ],
)
def test_what_is_no_removed_field(findings, text):
    assert findings(text, config("routed"), config()) == []


def test_a_field_that_the_configuration_never_had_is_an_error_where_the_type_is_stated(findings):
    text = "from vllm.config import VllmConfig\ndef f(c: VllmConfig):\n    return c.model_config.never\n"
    assert findings(text, config(), config()) == [("P217", "error", 3)]


@pytest.fixture
def since(make, held, tmp_path):
    """since(package, known, base, new) -> codes and levels, where an older release than the base is known."""

    def run(package, *texts):
        file = tmp_path / "plugin.py"
        file.write_text(dedent(package).lstrip("\n"), encoding="utf-8")
        made = [make(f"0.{number}.0", m=text) for number, text in enumerate(texts, 1)]
        known, base, new = held("source", *made)
        report = audit([read(file)], base, [new], known=[known])
        return [(one.code, one.level) for one in report.findings]

    return run


def test_what_an_older_release_had_the_code_was_written_for(since):
    """A package that pins nothing is compared with a base that may be newer than what it was written for."""
    later = OLD.replace("def pick(self): ...", "").replace("self.queue", "self.waiting")
    body = "from vllm.m import Engine\nclass Mine(Engine):\n    def helper(self):\n        return {}\n"
    assert since(body.format("self.pick()"), OLD, later, later) == [("P210", "error")]
    assert since(body.format("self.never"), OLD, later, later) == []
    assert since("from vllm.m import Engine\nEngine.pick\n", OLD, later, later) == [("P213", "error")]
    assert since("from vllm.m import Engine\nEngine.never\n", OLD, later, later) == [("P213", "error")]
    foreign = later.replace("class Engine:", "from torch import Thing\nclass Engine(Thing):")
    assert since("from vllm.m import Engine\nEngine.never\n", foreign, foreign, foreign) == []


@pytest.mark.parametrize(
    "text",
    [
        "class Mine(Engine):\n    def helper(self):\n        return self.pick()\n",
        "def f(engine: Engine):\n    return engine.pick\n",
    ],
)
def test_no_release_lost_what_a_later_one_got(make, held, tmp_path, text):
    """A release that is known because it is older than the last may be newer than another that is asked for."""
    file = tmp_path / "plugin.py"
    file.write_text(f"from vllm.m import Engine\n{text}", encoding="utf-8")
    before = OLD.replace("def pick(self): ...", "")
    texts = {"0.1.0": before, "0.2.0": before, "0.3.0": OLD, "0.4.0": OLD}
    base, first, known, last = held("source", *(make(version, m=each) for version, each in texts.items()))
    assert audit([read(file)], base, [first, last], known=[known]).findings == ()


def test_an_override_that_an_older_release_could_call(since):
    later = OLD.replace("def step(self, batch): ...", "def step(self, batch, wait=1): ...")
    body = "from vllm.m import Engine\nclass Mine(Engine):\n    def step(self, {}): ...\n"
    assert since(body.format("batch"), OLD, later, later) == [("P218", "error")]
    assert since(body.format("batch, wait=2"), OLD, later, later) == []
    assert since(body.format("batch, own"), OLD, OLD, OLD) == [("P218", "warning")]


def test_an_abstract_method_that_an_older_release_did_not_ask_for(since):
    package = "from vllm.m import Base\nclass C(Base):\n    def go(self): ...\n"
    assert since(package, ABSTRACT, STRICTER, STRICTER) == [("P216", "error")]
    assert since(package, STRICTER, STRICTER, STRICTER) == [], "it may hold functions for others"
    made = package + "    def __init__(self): ...\n"
    assert since(made, STRICTER, STRICTER, STRICTER) == [("P216", "warning")], "nobody could make one before"


CALLED = """
class Engine:
    def step(self, batch, wait=1): ...
    def run(self):
        self.step([], wait=2)
"""


def test_an_override_is_held_against_the_calls_in_vllm(findings):
    """The signature has not changed since the base: what vLLM passes in the audited release decides."""
    body = "from vllm.m import Engine\nclass Mine(Engine):\n    def step(self, {}): ...\n"
    assert findings(body.format("batch"), CALLED, CALLED) == [("P218", "error", 3)]
    assert findings(body.format("batch, *, wait"), CALLED, CALLED) == []
    assert findings(body.format("batch, **more"), CALLED, CALLED) == []
    quiet = CALLED.replace(", wait=2", "")
    assert findings(body.format("batch"), quiet, quiet) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("def mine(self, batch): ...\nEngine.step = mine", True),
        ("def mine(self, batch): ...\nsetattr(Engine, 'step', mine)", True),
        ("old = Engine.step\ndef mine(self, batch):\n    return old(self, batch)\nEngine.step = mine", True),
        (
            "def make(old):\n    def mine(self, batch):\n        return old(self, batch)\n    return mine\n"
            "Engine.step = make(Engine.step)",
            True,
        ),
        ("def mine(self, batch, *, wait): ...\nEngine.step = mine", False),
        ("def mine(self, *args, **more): ...\nEngine.step = mine", False),
        ("import functools\ndef mine(self, wait, batch): ...\nEngine.step = functools.partialmethod(mine, 1)", False),
        ("from x import hand_on\n@hand_on\ndef mine(self, batch): ...\nEngine.step = mine", False),
        ("import wrapt\ndef mine(wrapped, instance, args, kwargs): ...\n"
         "wrapt.wrap_function_wrapper('vllm.m', 'Engine.step', mine)", False),
        ("class Mine:\n    def step(self, batch): ...\nEngine.step = Mine().step", False),
    ],
)  # fmt: skip
def test_a_patch_is_held_against_the_calls_in_vllm_too(text, wrong, findings):
    found = [one[:2] for one in findings(f"from vllm.m import Engine\n{text}\n", CALLED, CALLED)]
    assert found == ([("P218", "error")] if wrong else [])


def test_a_function_in_the_place_of_a_static_method_takes_what_is_passed(findings):
    upstream = {"m": "class Engine:\n    @staticmethod\n    def of(config): ...\nEngine.of(1)\n"}
    text = "from vllm.m import Engine\ndef mine(config): ...\nEngine.of = mine\n"
    assert [one for one in findings(text, upstream, upstream) if one[0] == "P218"] == []


def test_a_patch_behind_a_test_is_held_against_the_calls_in_vllm(findings):
    """A mark against patching twice does not make it less certain."""
    text = "from vllm.m import Engine\ndef mine(self, batch): ...\n"
    marked = f"{text}if not getattr(Engine, '_patched', False):\n    Engine.step = mine\n    Engine._patched = True\n"
    assert findings(marked, CALLED, CALLED) == [("P218", "error", 4)]
    unsure = f"{text}if vllm_version_odd():\n    Engine.step = mine\n"
    assert [one[:2] for one in findings(unsure, CALLED, CALLED)] == [("P218", "warning")]


def test_a_call_on_another_object_counts_where_one_family_has_the_method(findings):
    body = "from vllm.m import Engine\nclass Mine(Engine):\n    def step(self, batch): ...\n"
    outside = CALLED.replace("self.step", "make().step")
    assert findings(body, outside, outside) == [("P218", "error", 3)]
    below = outside + "class Fast(Engine):\n    def step(self, batch, wait=1): ...\n"
    assert findings(body, below, below) == [("P218", "error", 3)]
    other = outside + "class Other:\n    def step(self, batch, wait=1): ...\n"
    assert findings(body, other, other) == [("P218", "error", 3)], "vLLM has no call that it takes"
    either = other + "make().step([])\n"
    assert findings(body, either, either) == [], "the call that it takes may be the one that it gets"
    own = CALLED + "class Other:\n    def step(self, batch, wait=1): ...\n"
    assert findings(body, own, own) == [("P218", "error", 3)], "a call on self goes to the override"


def test_a_sibling_that_calls_its_own_method_says_nothing(findings):
    body = "from vllm.m import Engine\nclass Mine(Engine):\n    def step(self, batch): ...\n"
    sibling = CALLED.replace("self.step([], wait=2)", "self.step([])")
    sibling += "class Fast(Engine):\n    def go(self):\n        self.step([], wait=2)\n"
    assert findings(body, sibling, sibling) == []


def test_an_override_behind_a_decorator_may_take_anything(findings):
    body = "from vllm.m import Engine\nclass Mine(Engine):\n    @adapted\n    def step(self, batch): ...\n"
    assert findings(body, CALLED, CALLED) == []


def test_a_name_that_an_older_release_had_is_not_added(since):
    """An assignment that is made whatever the release replaces what is gone; the imports of it fail."""
    later = OLD.replace("class Engine", "class Motor")
    package = "import vllm.m as m\nfrom vllm.m import Engine\nm.Engine = object\n"
    assert since(package, OLD, later, later) == [("P213", "error"), ("P213", "error")]
    filled = "import vllm.m as m\nif not hasattr(m, 'Engine'):\n    m.Engine = object\nfrom vllm.m import Engine\n"
    assert since(filled, OLD, later, later) == []
