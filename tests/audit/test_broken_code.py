"""Code that breaks on a newer release is reported, however it reaches vLLM; code that provides for it is not.

Each package below is written for the older of two releases; the comment ``# breaks`` marks the lines that fail on the
newer one.
"""

from __future__ import annotations

from textwrap import dedent

import pytest

from vllm_graft.audit.report import audit
from vllm_graft.audit.uses import read

OLD = {
    "m": dedent("""
        import enum
        from contextlib import contextmanager
        from dataclasses import dataclass
        from pydantic import BaseModel

        class State(enum.IntEnum):
            RUNNING = 1

        class Config:
            def __init__(self, size=1, *, rank=0): ...
            def gone(self): ...
            def stays(self, depth): ...
            @classmethod
            def from_vllm_config(cls, other): ...

        class Wide(Config):
            def wide(self): ...

        class Engine:
            def pause(self, *, wait=False): ...
            @classmethod
            def from_engine_args(cls, args): ...

        @dataclass
        class Fields:
            size: int = 0
            rank: int = 0

        class Body(BaseModel):
            kept: int = 0
            mask: int = 0

        def f(a, b=1): ...
        def g(a, b, c=0, d=0): ...
        def renamed(x, y): ...
    """)
}
NEW = {
    "m": OLD["m"]
    .replace("def __init__(self, size=1, *, rank=0): ...", "def __init__(self, size=1): ...")
    .replace("    def gone(self): ...\n", "")
    .replace("def pause(self, *, wait=False)", "def pause(self)")
    .replace("    rank: int = 0\n", "")
    .replace("    mask: int = 0\n", "")
    .replace("def f(a, b=1)", "def f(a)")
    .replace("def g(a, b, c=0, d=0)", "def g(a, c=0, d=0)")
    .replace("def renamed(x, y)", "def renamed(left, y)")
}
HEAD = "from vllm.m import Body, Config, Engine, Fields, Wide, f, g, renamed\n"

BROKEN = {
    "a class that an import in a try finds elsewhere": """
        try:
            from vllm.m import Config as Found
        except ImportError:
            from vllm.older import Config as Found
        def make():
            return Found(rank=1)  # breaks
    """,
    "a class that a version finds elsewhere": """
        import vllm
        if vllm.__version__ < "0.0.5":
            from vllm.older import Config as Found
        else:
            from vllm.m import Config as Found
        made = Found(rank=1)  # breaks
    """,
    "a base class that an import in a try finds elsewhere": """
        try:
            from vllm.older import Config as Found
        except ImportError:
            from vllm.m import Config as Found
        class Mine(Found):
            def more(self):
                return super().gone()  # breaks
            def other(self):
                return super().stays(height=1)  # breaks
    """,
    "a patch of a class that an import in a try finds elsewhere": """
        try:
            from vllm.older import Config as Found
        except ImportError:
            from vllm.m import Config as Found
        def mine(self): ...
        Found.gone = mine  # breaks
    """,
    "a test of another object": """
        import torch
        from importlib.util import find_spec
        def make(args, config):
            if hasattr(args, "rank"):
                Config(rank=1)  # breaks
            if getattr(config, "tied", False) and hasattr(torch, "npu"):
                return Config(rank=2)  # breaks
            if find_spec("flash_attn") is None:
                return Config(rank=3)  # breaks
            return Config(rank=4) if hasattr(args, "x") else None  # breaks
    """,
    "a test for what the package itself defines": """
        class Own(Config):
            has_rank = True
            def make(self, engine: Engine):
                if not hasattr(self, "has_rank"):
                    return None
                if hasattr(engine, "has_rank"):
                    return f(1, b=2)  # breaks
                return Config(rank=1)  # breaks
    """,
    "a package that is looked up by a function": """
        import importlib.metadata, importlib.util
        from packaging.version import Version
        def find(name, return_version=False):
            there = importlib.util.find_spec(name) is not None
            version = "N/A"
            if there:
                try:
                    version = importlib.metadata.version(name)
                except importlib.metadata.PackageNotFoundError:
                    there = False
            return (there, version) if return_version else there
        _vllm_available, _vllm_version = find("vllm", return_version=True)
        def is_available(least=None):
            if least:
                return _vllm_available and Version(_vllm_version) >= Version(least)
            return _vllm_available
        if is_available():
            Config(rank=1)  # breaks
    """,
    "a member of an Enum": """
        from vllm.m import State
        waiting = State.WAITING_FOR_FSM  # breaks
        running = State.RUNNING.value
        named = State.RUNNING.name, State.__members__, State.mro
    """,
    "a class that is None where its import fails": """
        try:
            from vllm.m import Config as Guarded
        except ImportError:
            Guarded = None
        def make():
            return Guarded(rank=1)  # breaks
    """,
    "the arm of an expression that runs": """
        import vllm
        from packaging.version import Version
        IS_OLD = Version(vllm.__version__) < Version("0.2")
        class Mine(Config):
            def one(self):
                return self.kept() if IS_OLD else self.gone()  # breaks
    """,
    "a call with a test among its arguments": """
        import vllm
        from packaging.version import Version
        IS_OLD = Version(vllm.__version__) < Version("0.2")
        class Mine(Config):
            def one(self):
                return self.gone(1 if IS_OLD else 2)  # breaks
    """,
    "an entry of the namespace": """
        kept = vars(Config)["gone"]  # breaks
    """,
    "a method that is taken from super()": """
        class Mine(Config):
            def more(self):
                above = super().gone  # breaks
                return above()
    """,
    "a property with an annotation": """
        class Holder:
            @property
            def held(self) -> Config: ...
            def read(self):
                return self.held.gone()  # breaks
    """,
    "a method with an annotation": """
        class Holder:
            def held(self) -> Config: ...
            def read(self):
                return self.held().gone()  # breaks
    """,
    "a handler that raises again": """
        class Mine(Config):
            def more(self):
                try:
                    return self.gone()  # breaks
                except AttributeError as error:
                    raise RuntimeError from error
    """,
    "a handler of all exceptions around much": """
        class Mine(Config):
            def more(self):
                try:
                    print()
                    return self.gone()  # breaks
                except Exception:
                    return None
    """,
    "an attribute that holds an annotated parameter": """
        class Holder:
            def __init__(self, config: Config):
                self.held = config
            def read(self):
                return self.held.gone()  # breaks
    """,
    "an attribute with an annotation": """
        class Holder:
            def __init__(self, anything):
                self.held: Config = anything
            def read(self):
                return self.held.gone()  # breaks
    """,
    "an annotation in the class body": """
        class Holder:
            held: Config
            def read(self):
                return self.held.gone()  # breaks
    """,
    "a field of a dataclass": """
        import dataclasses
        @dataclasses.dataclass
        class Holder:
            held: "Config | None" = None
            def read(self):
                return self.held.gone()  # breaks
    """,
    "an attribute that holds a new object": """
        class Holder:
            def read(self):
                return self.engine.pause(wait=True)  # breaks
            def __init__(self):
                self.engine = Engine()
    """,
    "an attribute that a base class sets": """
        class Base:
            def __init__(self, config: Config):
                self.held = config
        class Holder(Base):
            def read(self):
                return self.held.gone()  # breaks
    """,
    "a subclass without a constructor": """
        class Mine(Config): pass
        Mine(rank=1)  # breaks
    """,
    "a constructor that passes everything on": """
        class Mine(Config):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.more = 1
        Mine(rank=1)  # breaks
    """,
    "cls() in a class method": """
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls(rank=1)  # breaks
    """,
    "a class method that calls another": """
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls.stays(), cls.gone()  # breaks
        class More(Mine):
            pass
    """,
    "a patch of a class method": """
        from vllm_graft import VLLMPatch
        class Patch(VLLMPatch["vllm.m:Config"], name="p"):
            @classmethod
            def from_vllm_config(cls, other):
                return cls.gone()  # breaks
    """,
    "super() in a variable": """
        class Mine(Config):
            def call(self):
                above = super()
                return above.gone()  # breaks
    """,
    "one base or another": """
        import os
        Base = Wide if os.environ.get("WIDE") else Config
        class Mine(Base):
            def call(self):
                return self.gone()  # breaks
    """,
    "a base that is imported from one of two places": """
        try:
            from vllm.m import Wide as Base
        except ImportError:
            from vllm.m import Config as Base
        class Mine(Base):
            def call(self):
                return self.gone()  # breaks
    """,
    "a class method that returns an object": """
        def start(args):
            engine = Engine.from_engine_args(args)
            return engine.pause(wait=True)  # breaks
    """,
    "an annotated function of the package": """
        def make() -> Config: ...
        def call():
            return make().gone()  # breaks
    """,
    "an awaited function of the package": """
        async def make() -> Config: ...
        async def call():
            return (await make()).gone()  # breaks
    """,
    "a property of the package": """
        class Holder:
            @property
            def config(self) -> Config: ...
            def call(self):
                return [Config, self.config.gone()]  # breaks
    """,
    "a field of a pydantic model": """
        def read(body: Body):
            return body.kept, body.mask  # breaks
    """,
    "isinstance": """
        def read(anything):
            if isinstance(anything, Config):
                return anything.gone()  # breaks
    """,
    "cast": """
        import typing
        def read(anything):
            return typing.cast(Config, anything).gone()  # breaks
    """,
    "Annotated": """
        from typing import Annotated
        def read(anything: Annotated[Config, "fact"]):
            return anything.gone()  # breaks
    """,
    "keywords in a dictionary": """
        Config(**{"size": 1, "rank": 2})  # breaks
        Config(**dict(size=1, rank=2))  # breaks
        Config(**{"size": 1})
        Config(**dict(size=1))
    """,
    "super with its arguments": """
        class Mine(Config):
            def read(self):
                super(Mine, self).gone()  # breaks
                super(Mine, self).stays(1)
            def call(self):
                return super(Mine, self).stays()  # breaks
    """,
    "a function with some arguments": """
        import functools
        functools.partial(Config, rank=1)  # breaks
        functools.partial(Config, size=1)
    """,
    "dataclasses.replace": """
        import dataclasses
        def change(fields: Fields):
            return dataclasses.replace(fields, rank=1)  # breaks
    """,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_breaks_is_an_error_where_it_stands(kind, findings):
    package = HEAD + dedent(BROKEN[kind])
    lines = {number for number, line in enumerate(package.splitlines(), 1) if "# breaks" in line}
    found = findings(package, OLD, NEW)
    assert {line for _, level, line in found if level == "error"} == lines, found


FINE = {
    "a class with __getattr__": """
        class Mine(Config):
            def __getattr__(self, name): ...
            def more(self):
                return self.gone()
    """,
    "the annotation of a local variable": """
        import vllm.m as m
        def local():
            value: m.Config.gone = 1
            return value
    """,
    "an attribute that holds something else later": """
        class Holder:
            def __init__(self, config: Config):
                self.held = config
            def swap(self, other):
                self.held = other
            def read(self):
                return self.held.gone()
    """,
    "an attribute that a subclass sets anew": """
        class Base:
            def __init__(self, config: Config):
                self.held = config
        class Holder(Base):
            def __init__(self, other):
                self.held = other
            def read(self):
                return self.held.gone()
    """,
    "an object of one of two classes": """
        try:
            from other import Adapter
        except ImportError:
            from vllm.m import Engine as Adapter
        class Holder:
            def __init__(self):
                self.engine = Adapter()
            def read(self):
                return self.engine.pause(wait=True)
    """,
    "an annotation that a subclass fits": """
        class Holder:
            def __init__(self, engine: Engine):
                self.engine = engine
            def read(self):
                return self.engine.pause(more=True)
    """,
    "a constructor of its own": """
        class Mine(Config):
            def __init__(self, rank):
                super().__init__()
        Mine(rank=1)
    """,
    "a constructor that takes a keyword out": """
        class Mine(Config):
            def __init__(self, *args, **kwargs):
                kwargs.pop("rank")
                super().__init__(*args, **kwargs)
        Mine(rank=1)
    """,
    "cls() of a class with subclasses": """
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls(rank=1)
        class Other(Mine):
            def __init__(self, *args, **kwargs): ...
    """,
    "cls.gone() that a subclass, a mixin or an assignment provides": """
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls.gone()
        class Mixin:
            def gone(self): ...
        class Other(Mixin, Mine): ...
        class Assigned(Config):
            @classmethod
            def make(cls):
                return cls.gone()
        Assigned.gone = classmethod(lambda cls: 1)
    """,
    "cls.gone() that setattr provides": """
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls.gone()
        setattr(Mine, "gone", classmethod(lambda cls: 1))
    """,
    "cls.gone() with a base of another package somewhere": """
        from elsewhere import Mixin
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls.gone()
        class Other(Mixin, Mine): ...
    """,
    "cls.gone() with a metaclass": """
        class Mine(Config, metaclass=type(Engine)):
            @classmethod
            def make(cls):
                return cls.gone()
    """,
    "cls.gone() behind a test or a handler": """
        class Mine(Config):
            @classmethod
            def make(cls):
                return cls.gone() if hasattr(cls, "gone") else 1
            @classmethod
            def find(cls):
                if getattr(cls, "gone", None):
                    cls.gone()
            @classmethod
            def try_it(cls):
                try:
                    cls.gone()
                except AttributeError:
                    pass
            @classmethod
            def other(cls):
                cls = cls.__base__
                cls.gone()
    """,
    "one base of several that has the method": """
        import os
        Base = Wide if os.environ.get("WIDE") else Config
        class Mine(Base):
            def call(self):
                return self.wide()
    """,
    "isinstance, and afterwards": """
        def read(anything):
            if isinstance(anything, Config):
                anything.stays(1)
            return anything.gone()
    """,
    "a method that every pydantic model has": """
        def read(body: Body):
            return body.kept, body.model_dump(), body.json()
    """,
    "a parameter that only has another name": "renamed(1, 2)",
    "a member that the package adds to an Enum": """
        from aenum import extend_enum
        from vllm.m import State
        if not hasattr(State, "WAITING_FOR_CHUNK"):
            extend_enum(State, "WAITING_FOR_CHUNK", -1)
        waiting = State.WAITING_FOR_CHUNK
    """,
}


@pytest.mark.parametrize("kind", FINE)
def test_what_may_well_work_is_no_finding(kind, findings):
    assert [one for one in findings(HEAD + dedent(FINE[kind]), OLD, NEW) if one[1] != "info"] == []


GUARDED = {
    "a handler for a missing method of super()": """
        class Mine(Config):
            def more(self):
                try:
                    return super().gone()
                except AttributeError:
                    return None
    """,
    "a version in an expression": """
        import vllm
        from packaging.version import Version
        IS_OLD = Version(vllm.__version__) < Version("0.2")
        class Mine(Config):
            def one(self):
                return self.gone() if IS_OLD else None
            def other(self):
                return IS_OLD and self.gone()
    """,
    "a handler for a missing attribute of the object": """
        class Mine(Config):
            def more(self):
                try:
                    print()
                    return self.gone()
                except (KeyError, AttributeError):
                    return None
    """,
    "a handler of all exceptions around one statement": """
        class Mine(Config):
            def more(self):
                try:
                    return self.gone()
                except Exception:
                    return None
    """,
    "suppress around an attribute of the object": """
        import contextlib
        class Mine(Config):
            def more(self):
                with contextlib.suppress(AttributeError):
                    return self.gone()
    """,
    "a handler around an entry of the namespace": """
        try:
            kept = Config.__dict__["gone"]
        except KeyError:
            kept = None
    """,
    "the names of a class": 'if "gone" in Config.__dict__:\n    x = Config.gone\n',
    "dir()": 'if "gone" in dir(Config):\n    x = Config.gone\n',
    "vars()": 'if "gone" in vars(Config):\n    x = Config.gone\n',
    "not in": 'if "gone" not in Config.__dict__:\n    pass\nelse:\n    x = Config.gone\n',
    "fields": 'if "rank" in Fields.__dataclass_fields__:\n    Fields(rank=1)\n',
    "parameters": 'import inspect\nif "b" in inspect.signature(f).parameters:\n    f(1, b=2)\n',
    "parameters in a flag": """
        import inspect
        HAS = "b" in inspect.signature(f).parameters
        def call():
            return f(1, b=2) if HAS else f(1)
    """,
    "parameters in a variable": """
        import inspect
        def call():
            taken = inspect.signature(f).parameters
            return f(1, b=2) if "b" in taken else f(1)
        def other():
            signature = inspect.signature(f)
            if "b" in signature.parameters.keys():
                return f(1, b=2)
        def third():
            if "b" in set(inspect.getfullargspec(f).args):
                return f(1, b=2)
    """,
    "fields of a dataclass in a set": """
        from dataclasses import fields
        NAMES = {one.name for one in fields(Fields)}
        if "rank" in NAMES:
            Fields(rank=1)
        if any(one.name == "rank" for one in fields(Fields)):
            Fields(rank=1)
    """,
    "a helper that looks into a signature": """
        import inspect
        def takes(function, name):
            try:
                known = inspect.signature(function).parameters
            except (TypeError, ValueError):
                return False
            return name in known
        if takes(Fields, "rank"):
            Fields(rank=1)
    """,
    "a helper that calls another helper": """
        import vllm
        from packaging.version import Version
        def at_least(least): return Version(vllm.__version__) >= Version(least)
        def is_new(): return at_least("0.2")
        def is_old(): return not is_new()
        def call():
            if is_old():
                f(1, b=2)
            return None if is_new() else Config.gone
    """,
    "the object that is patched": """
        def mine(self, depth):
            if hasattr(self, "gone"):
                return self.gone()
        Config.stays = mine
    """,
    "assert": """
        import vllm
        from packaging.version import Version
        def call():
            assert Version(vllm.__version__) < Version("0.2")
            return f(1, b=2)
    """,
}


@pytest.mark.parametrize("kind", GUARDED)
def test_code_that_asks_first_is_no_finding(kind, findings):
    assert [one for one in findings(HEAD + dedent(GUARDED[kind]), OLD, NEW) if one[1] != "info"] == []


@pytest.mark.parametrize(
    "package",
    [
        'if "gone" in Wide.__dict__ or True:\n    f(1, b=2)\n',
        'if "size" in Fields.__dataclass_fields__:\n    f(1, b=2)\n',
        'import inspect\nif "a" in inspect.signature(f).parameters:\n    f(1, b=2)\n',
        'class Mine: ...\nif "gone" in Mine.__dict__:\n    f(1, b=2)\n',
    ],
)
def test_a_test_that_holds_lets_the_code_run(package, findings):
    assert ("P215", "error") in [one[:2] for one in findings(HEAD + package, OLD, NEW)]


def test_arguments_that_reach_another_parameter_are_a_warning(findings):
    assert findings("from vllm.m import g\ng(1, 2)\ng(1)\n", OLD, NEW) == [("P202", "warning", 2)]


@pytest.mark.parametrize(
    "test",
    [
        "from importlib.metadata import version as of\nif Version(of('vllm')) < Version('0.2'):",
        "import vllm\nif (here := Version(vllm.__version__)) is not None: ...\nif here < Version('0.2'):",
    ],
)
def test_a_version_under_any_name_is_compared(test, findings):
    package = f"{HEAD}from packaging.version import Version\n{test}\n    Config.gone\n"
    assert findings(package, OLD, NEW) == []
    assert findings(package.replace("<", ">="), OLD, NEW) != []


STAR = {"m": "def kept(): ...\ndef gone(): ...\nclass Base:\n    def gone(self): ...\n"}
STARLESS = {"m": "def kept(): ...\nclass Base:\n    pass\n"}


@pytest.mark.parametrize(
    ("package", "lines"),
    [
        ("from vllm.m import *\ndef call():\n    return kept(), gone()\n", {3}),
        ("from vllm.m import *\nclass Mine(Base):\n    def call(self):\n        return self.gone()\n", {4}),
        ("from vllm.m import *\nkept_as = gone\n", {2}),
        ("from vllm.m import *\ngone = 1\ndef call():\n    return gone\n", set()),
        ("from vllm.m import *\ndef call(gone):\n    return gone, undefined, len, [gone for gone in ()]\n", set()),
        ("from vllm.m import *\nfrom torch import *\ngone()\n", set()),
    ],
)
def test_names_of_a_star_import(package, lines, findings):
    assert {line for _, level, line in findings(package, STAR, STARLESS) if level == "error"} == lines


def test_a_name_that_one_of_two_star_imports_still_has(findings):
    package = "from vllm.m import *\nfrom vllm.n import *\ngone()\n"
    old, new = {**STAR, "n": ""}, {**STARLESS, "n": "def gone(): ...\n"}
    assert [one for one in findings(package, old, new) if one[1] != "info"] == []


def test_a_star_import_through_a_module_of_the_package(uses_of, make, held):
    from vllm_graft.audit.report import audit

    package = uses_of(
        compat="from vllm.m import *\n",
        more="from .compat import *\ndef call():\n    return gone()\n",
        named="from plug.compat import gone\n",
    )
    releases = held("source", make("0.1.0", **STAR), make("0.2.0", **STARLESS))
    found = audit([package], releases[0], releases[1:]).findings
    assert sorted(one.where for one in found if one.level == "error") == ["plug/more.py:3", "plug/named.py:1"]


@pytest.fixture
def uses_of(tmp_path):
    """Read a package ``plug`` of these modules."""
    from vllm_graft.audit.uses import read

    def uses_of(**modules):
        folder = tmp_path / "plug"
        folder.mkdir()
        for name, text in {"__init__": "", **modules}.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        return read(folder)

    return uses_of


KINDS = """
from contextlib import contextmanager
@contextmanager
def managed(x): yield x
def generator(x): yield x
def plain(x): ...
async def coroutine(x): ...
"""


@pytest.mark.parametrize(
    ("hook", "refused"),
    [
        ("@replace\n    def managed(x):\n        yield x", True),
        ("@replace\n    @contextmanager\n    def managed(x):\n        yield x", False),
        ("@wrap\n    def managed(call, x):\n        return call(x)", False),
        ("@replace\n    def generator(x):\n        return [x]", True),
        ("@wrap\n    def generator(call, x):\n        yield from call(x)", False),
        ("@replace\n    def plain(x):\n        yield x", True),
        ("@replace\n    def coroutine(x):\n        return x", True),
        ("@replace\n    async def coroutine(x):\n        return x", False),
        ("@replace\n    @decorated\n    def plain(x):\n        yield x", False),
    ],
)
def test_a_patch_of_another_kind_of_function_is_refused_as_a_start_refuses_it(hook, refused, findings):
    package = "from contextlib import contextmanager\n" + PATCH.format(target="m", hook=hook)
    assert [one[:2] for one in findings(package, KINDS, KINDS)] == ([("P222", "error")] if refused else [])


SCHEDULER = "class Scheduler:\n    def __init__(self):\n        self.running = []\n    def schedule(self): ...\n"
PATCH = """
from vllm_graft import VLLMPatch, add, replace, wrap
class P(VLLMPatch["vllm.{target}"], name="p"):
    {hook}
"""


@pytest.mark.parametrize(
    "hook",
    [
        "@replace\n    def running(self): return []",
        "@wrap\n    def running(self, call): return call()",
        "running = replace([])",
        "@replace\n    def nothing(self): return []",
    ],
)
def test_a_patch_on_a_name_that_only_objects_have_is_an_error(hook, findings):
    package = PATCH.format(target="m:Scheduler", hook=hook).lstrip()
    assert [one[:2] for one in findings(package, SCHEDULER, SCHEDULER)] == [("P213", "error")]


def test_a_patch_may_add_what_objects_have(findings):
    package = PATCH.format(target="m:Scheduler", hook="running = 5").lstrip()
    assert findings(package, SCHEDULER, SCHEDULER) == []


STATES = "import enum\nclass State(enum.IntEnum):\n    WAITING = 1\n    def label(self): ...\n"
ENVS = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    VLLM_PORT: int = 5
def __getattr__(name): ...
"""


@pytest.mark.parametrize(
    ("target", "hook", "refused"),
    [
        ("m:State", "WAITING = 99", True),
        ("m:State", "WAITING = replace(99)", True),
        ("m:State", "@replace\n    def label(self): return 1", False),
        ("envs", "@replace\n    def VLLM_PORT(): return 1", True),
        ("envs", "VLLM_PORT = replace(4)", True),
        ("envs", "VLLM_PORT = 4", False),
        ("envs", "VLLM_PORT = add(4)", False),
    ],
)
def test_a_patch_that_a_start_refuses_is_an_error(target, hook, refused, findings):
    package = PATCH.format(target=target, hook=hook).lstrip()
    modules = {"m": STATES, "envs": ENVS}
    assert [one[:2] for one in findings(package, modules, modules)] == ([("P222", "error")] if refused else [])


def test_a_variable_that_the_package_adds_to_those_of_vllm(findings):
    package = "import vllm.envs as envs\nenvs.environment_variables['MINE'] = lambda: 1\nenvs.MINE\n"
    modules = {"envs": f"{ENVS}environment_variables = {{}}\n"}
    assert findings(package, modules, modules) == []
    assert findings(package.replace("envs.MINE", "envs.MINES"), modules, modules) != []


@pytest.mark.parametrize(
    "package",
    [
        "import vllm.sub as sub\nx = sub.inner.m.gone",
        "from vllm import sub\nx = sub.inner.m.gone()",
        "from vllm.sub import inner\nx = inner.m.gone()",
    ],
)
def test_a_name_behind_several_modules(package, findings):
    modules = {"sub": "", "sub.inner": "", "sub.inner.m": "def gone(): ...\nlogger = 1"}
    fine = package.replace("m.gone", "m.logger.handlers.clear")
    new = {**modules, "sub.inner.m": "logger = 1"}
    assert findings(package, modules, new) == [("P201", "error", 2)]
    assert findings(fine, modules, new) == []


def test_what_a_function_has_is_reported_by_the_name_of_the_function(make, held, tmp_path):
    base, new = held("source", make("0.1.0", m="def f(): ...\ndef g(): ..."), make("0.2.0", m=""))
    file = tmp_path / "plugin.py"
    file.write_text("import vllm.m as m\nm.f()\nm.f.cache_clear()\nm.g.cache_clear()\n", encoding="utf-8")
    report = audit([read(file)], base, [new])
    assert [one.subject for one in report.findings] == ["import vllm.m:f", "import vllm.m:g"]
