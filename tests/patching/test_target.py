"""Finding the class or module that a patch changes."""

import enum
import sys
from pathlib import Path

import pytest

from vllm_graft.errors import TargetError
from vllm_graft.patching import VLLMPatch, add, replace, wrap
from vllm_graft.testing import zygote


def test_strings_find_classes_inner_classes_and_modules(engine, make):
    """ "pkg.mod:Class", "pkg.mod:Outer.Inner" and "pkg.mod"."""
    module = make("""
        class A:
            class B:
                def f(self): return 1
            def f(self): return 1
        def f(): return 1
    """)

    class P(VLLMPatch[f"{module.__name__}:A"]):
        def f(self):
            return 2

    class Q(VLLMPatch[f"{module.__name__}:A.B"]):
        def f(self):
            return 3

    class R(VLLMPatch[module.__name__]):
        def f():
            return 4

    engine.apply([P, Q, R])
    assert (module.A().f(), module.A.B().f(), module.f()) == (2, 3, 4)


def test_a_missing_class(engine, make):
    """The error names the patch, the target, the nearest name and the next step."""
    module = make("class Scheduler: ...")

    class P(VLLMPatch[f"{module.__name__}:Schedular"], name="fair"): ...

    with pytest.raises(TargetError) as caught:
        engine.apply([P])
    text = str(caught.value)
    assert text.startswith("patch 'fair' (")
    assert f"on {module.__name__}:Schedular: there is no 'Schedular' in {module.__name__}" in text
    assert "(did you mean 'Scheduler'?). Next: compare the target" in text


def test_a_missing_inner_class(engine, make):
    module = make("class Outer:\n    class Inner: ...")

    class P(VLLMPatch[f"{module.__name__}:Outer.Iner"]): ...

    with pytest.raises(TargetError, match=f"no 'Iner' in {module.__name__}:Outer .did you mean 'Inner'"):
        engine.apply([P])


def test_a_function_is_no_target(engine, make):
    module = make("def f(): ...")

    class P(VLLMPatch[f"{module.__name__}:f"]): ...

    with pytest.raises(TargetError, match=f'it is a function.*target the owner, "{module.__name__}", and define .f.'):
        engine.apply([P])


def test_missing_modules_are_found_out_without_importing(engine, write, tmp_path):
    """A module that does not exist is refused at once; its parents are not imported for that."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "heavy" / "sched.py").write_text("")
    write("")

    class A(VLLMPatch["heavy.shed:Scheduler"], name="a"): ...

    class B(VLLMPatch["heavy.Scheduler"], name="b"): ...

    class C(VLLMPatch["nowhere_at_all.x:Y"], name="c"): ...

    class D(VLLMPatch["heavy.sched.more:Y"], name="d"): ...

    class E(VLLMPatch["heavy.sched:Anything"], name="e"): ...

    with pytest.raises(TargetError, match=r"'a'.*no module 'shed' in 'heavy' \(did you mean 'sched'\?\)"):
        engine.apply([A])
    with pytest.raises(TargetError, match=r'\'b\'.*no module \'Scheduler\'.*write "heavy:Scheduler" if .* is a class'):
        engine.apply([B])
    with pytest.raises(TargetError, match=r"'c'.*no module 'nowhere_at_all'.*Next: install it"):
        engine.apply([C])
    with pytest.raises(TargetError, match=r"'d'.*no module 'more' in 'heavy.sched'"):
        engine.apply([D])
    engine.apply([E])
    assert "heavy" not in sys.modules


class Colour(enum.Enum):
    RED = 1

    def shout(self):
        return self.name + "!"


def test_enum_members_cannot_be_set(engine):
    """A value set on an Enum is not a member, so it is refused; methods can be patched."""

    class P(VLLMPatch[Colour], name="p"):
        RED = 2

    class Q(VLLMPatch[Colour], name="q"):
        @wrap
        def shout(self, call):
            return call() + "!"

    with pytest.raises(TargetError, match=r"'p'.*sets 'RED', but Colour is an Enum.*Next: patch the code that reads"):
        engine.apply([P])
    engine.apply([Q])
    assert Colour.RED.shout() == "RED!!"


def test_types_made_in_c(engine):
    """Their attributes cannot be set."""

    class P(VLLMPatch[int]):
        @add
        def twice(self):
            return self * 2

    with pytest.raises(TargetError, match=r"int is a type made in C.*Next: patch the Python code that uses it"):
        engine.apply([P])


def test_functions_without_python_code(engine, make):
    """What has no Python code cannot be wrapped or replaced: built-in functions, methods of C types."""
    module = make("""
        from math import sqrt
        class Table(dict): ...
    """)

    class P(VLLMPatch[module]):
        @replace
        def sqrt(x): ...

    class Q(VLLMPatch[module.Table]):
        @wrap
        def __getitem__(self, call, key):
            return call(key)

    for patch, name in ((P, "sqrt"), (Q, "__getitem__")):
        with pytest.raises(TargetError, match=f"'{name}' is a .* without Python code.*Next: patch the Python function"):
            engine.apply([patch])


REAL = """
import sys

from vllm_graft.errors import TargetError
from vllm_graft.patching import Engine, VLLMPatch, wrap

class P(VLLMPatch["vllm.v1.core.sched.scheduler:Scheduler"]):
    @wrap
    def schedule(self, call, *args, **kwargs):
        return call(*args, **kwargs)

class Q(VLLMPatch["vllm.v1.core.sched.schedular:Scheduler"]): ...

engine = Engine()
print([state.state for state in engine.apply([P])])
try:
    engine.apply([Q])
except TargetError as error:
    print(error)
print("vllm" in sys.modules)
"""


def test_real_targets_by_name(tmp_path: Path):
    """A class of the installed vLLM is armed without importing vLLM, and a misspelt module of it is refused."""
    (tmp_path / "real.py").write_text(REAL, encoding="utf-8")
    done = zygote.run([sys.executable, str(tmp_path / "real.py")], capture_output=True, text=True, check=True)
    armed, refused, imported = done.stdout.strip().splitlines()
    assert armed == "['armed']"
    assert "'Scheduler' is defined in vllm.v1.core.sched.scheduler:Scheduler" in refused
    assert imported == "False"
