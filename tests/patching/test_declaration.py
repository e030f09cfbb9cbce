"""Declaring a patch: what stands in brackets, the keywords, the marks, and everything that is refused on the spot."""

import functools
import inspect
import sys

import pytest

from vllm_graft.errors import DeclarationError
from vllm_graft.patching import VLLMPatch, add, min_vllm_version, replace, wrap
from vllm_graft.patching.declaration import KEYWORDS


class Target:
    limit = 1

    def f(self, x):
        return x

    @property
    def p(self):
        return 1


def kinds(patch):
    return {hook.attribute: (hook.kind, hook.form) for hook in patch.declaration.hooks}


def test_a_declaration_keeps_what_was_said():
    """Every keyword is found again, and declaring imports nothing."""

    class Guard(
        VLLMPatch["some.heavy.module:Outer.Inner"],
        name="guard",
        vllm=">=0.26, <0.33",
        why="reason",
        upstream="vllm#1",
        remove_when="0.34",
        processes={"frontend", "engine"},
    ):
        def f(self): ...

    said = Guard.declaration
    assert (said.name, str(said.target), said.vllm) == ("guard", "some.heavy.module:Outer.Inner", ">=0.26,<0.33")
    assert (said.why, said.upstream, said.remove_when) == ("reason", "vllm#1", "0.34")
    assert said.processes == {"frontend", "engine"}
    assert said.defined_in.endswith(".Guard")
    assert "some" not in sys.modules


def test_defaults():
    """The name is the class's; every release and every process is meant."""

    class Guard(VLLMPatch[Target]): ...

    assert Guard.declaration.name == "Guard"
    assert Guard.declaration.vllm == ""
    assert Guard.declaration.processes == {"frontend", "engine", "worker", "registry"}
    assert Guard.declaration.hooks == ()


def test_targets():
    """A class, a module, and a string for either."""

    class A(VLLMPatch[Target]): ...

    class B(VLLMPatch[functools]): ...

    class C(VLLMPatch["os.path"]): ...

    assert str(A.declaration.target) == f"{__name__}:Target"
    assert str(B.declaration.target) == "functools"
    assert str(C.declaration.target) == "os.path"
    assert [p.declaration.target.is_class for p in (A, B, C)] == [True, False, False]


@pytest.mark.parametrize("target", [3, None, len, "", "a b", "a:", "a:b:c", "a..b", ":x"])
def test_what_cannot_be_a_target(target):
    """Anything else is refused with the forms that work."""
    with pytest.raises(DeclarationError, match=r"VLLMPatch\[\.\.\.\].*Next: (name a class|write)"):
        VLLMPatch[target]


def test_without_marks():
    """A hook that reaches what is beneath wraps; the rest is decided by the target."""

    class P(VLLMPatch[Target]):
        limit = 5

        def f(self, x):
            return self._original_f(x)

        def g(self, call, x):
            return call(x)

        def h(self):
            return (lambda: self._original_f(1))()

        @classmethod
        def c(cls, call):
            return call()

        @staticmethod
        def s(call, x):
            return call(x)

        @property
        def p(self):
            return self._original_p

    assert kinds(P) == {
        "limit": ("auto", "value"),
        "f": ("wrap", "function"),
        "g": ("wrap", "function"),
        "h": ("auto", "function"),
        "c": ("wrap", "classmethod"),
        "s": ("wrap", "staticmethod"),
        "p": ("wrap", "property"),
    }


def test_marks_stand_on_either_side():
    """@wrap, @replace and @add may stand above or below classmethod, staticmethod and property."""

    class P(VLLMPatch[Target]):
        @replace
        @classmethod
        def a(cls): ...

        @classmethod
        @replace
        def b(cls): ...

        @staticmethod
        @add
        def c(): ...

        @replace
        @property
        def d(self):
            """Doc."""

        @d.setter
        def d(self, value): ...

        @property
        @add
        def e(self): ...

        n = replace(3)

    assert kinds(P) == {
        "a": ("replace", "classmethod"),
        "b": ("replace", "classmethod"),
        "c": ("add", "staticmethod"),
        "d": ("replace", "property"),
        "e": ("add", "property"),
        "n": ("replace", "value"),
    }
    d = next(hook.value for hook in P.declaration.hooks if hook.attribute == "d")
    assert d.fset is not None
    assert d.__doc__ == "Doc."


def test_bookkeeping_is_no_hook():
    """What Python puts into a class body is skipped: the docstring, annotations, the __hash__ that __eq__ implies."""

    class P(VLLMPatch[Target]):
        """Doc."""

        x: int

        def __eq__(self, other):
            return True

        def f(self, x):
            return super().f(x)

    assert list(kinds(P)) == ["__eq__", "f"]


def test_upstream_methods_may_be_named_like_ours():
    """A hook named ``apply`` does not hide the patch's own ``apply()``."""

    class P(VLLMPatch[Target]):
        def apply(self): ...

        def revert(self): ...

    assert P.apply.__func__ is VLLMPatch.apply.__func__
    assert list(kinds(P)) == ["apply", "revert"]


def refusal(**body):
    """The text of the refusal of a patch with this body."""
    with pytest.raises(DeclarationError) as caught:
        type(VLLMPatch)("P", (VLLMPatch[Target],), body)
    return str(caught.value)


def test_the_keywords_that_a_mistake_is_shown_are_all_there_are():
    taken = inspect.signature(VLLMPatch.__init_subclass__).parameters.values()
    assert {*KEYWORDS} == {one.name for one in taken if one.kind is one.KEYWORD_ONLY}


def test_unknown_keyword():
    with pytest.raises(DeclarationError, match=r"patch 'P' .*no keyword 'proceses' \(did you mean 'processes'\?\)"):

        class P(VLLMPatch[Target], proceses={"engine"}): ...


@pytest.mark.parametrize("name", ["a,b", "a b", "*", "ä"])
def test_a_name_must_fit_a_list(name):
    with pytest.raises(DeclarationError, match=r"cannot be its name.*Next: use letters"):

        class P(VLLMPatch[Target], name=name): ...


def test_unknown_process():
    with pytest.raises(DeclarationError, match=r"no process 'workers' \(did you mean 'worker'\?\)"):

        class P(VLLMPatch[Target], processes={"workers"}): ...

    with pytest.raises(DeclarationError, match=r"names no process"):

        class Q(VLLMPatch[Target], processes=()): ...


@pytest.mark.parametrize("text", ["0.26", ">=", "=>0.3", ">=0.26;<0.33", ">=0.26.*", "~=1", "latest"])
def test_a_range_must_be_one(text):
    with pytest.raises(DeclarationError, match=r'not a part of a version range.*Next: write vllm=">=0.26,<0.33"'):

        class P(VLLMPatch[Target], vllm=text): ...


def test_a_patch_has_a_target_and_one_base():
    """A patch without a target, with another base, or of a patch is refused: only its own body would be applied."""
    with pytest.raises(DeclarationError, match=r"no target.*class P\(VLLMPatch\[Target\]\)"):

        class P(VLLMPatch): ...

    class Mixin:
        def f(self): ...

    with pytest.raises(DeclarationError, match=r"inherits from something other than.*VLLMPatch\[Target\] alone"):

        class Q(Mixin, VLLMPatch[Target]): ...

    class R(VLLMPatch[Target]): ...

    with pytest.raises(DeclarationError, match=r"inherits from something other than"):

        class S(R): ...

    with pytest.raises(DeclarationError, match=r"R has a target already"):
        R[Target]


def test_the_base_itself_cannot_be_applied():
    with pytest.raises(DeclarationError, match=r"'VLLMPatch' is not a declared patch.*class MyPatch"):
        VLLMPatch.apply()


def test_mangled_names_are_refused():
    """``self.__x`` means another name here than upstream; the full name is what works."""
    with pytest.raises(
        DeclarationError, match=r"'f' uses '__x', .* to '_Guard__x'.*Next: write the full name: _Target__x"
    ):

        class Guard(VLLMPatch[Target]):
            def f(self):
                return self.__x

    with pytest.raises(DeclarationError, match=r"uses '__x'"):

        class _Guard(VLLMPatch[Target]):
            def f(self):
                return [self.__x for _ in range(3)]

    with pytest.raises(DeclarationError, match=r"renames '__f'.*def _Target__f"):

        class Other(VLLMPatch[Target]):
            def __f(self): ...

    class Fine(VLLMPatch[Target]):
        def f(self):
            return self._Target__x, self.__dict__


def test_forms_that_cannot_be_set():
    """Classes, callable objects and foreign descriptors are refused with the forms that work."""
    forms = r"use functions, classmethods, staticmethods, properties or plain values"
    for value in (int, len, functools.partial(int), functools.cached_property(lambda self: 1), classmethod(len)):
        assert forms in refusal(f=value)
    assert "cannot change __slots__" in refusal(__slots__=())
    for name, value in {"__bases__": (object,), "__name__": "T", "__mro__": (), "__class__": property(id)}.items():
        assert f"cannot change {name}, which Python keeps outside" in refusal(**{name: value})
    assert "'x' is a type" in refusal(x=Target)
    with pytest.raises(
        DeclarationError, match=r"'p' is a property, which cannot be put on functools.*use functions or"
    ):

        class P(VLLMPatch[functools]):
            @property
            def p(self): ...


def test_a_wrap_reaches_what_is_beneath():
    with pytest.raises(DeclarationError, match=r"'f' is marked @wrap but never.*self\._original_f.*'call'.*@replace"):

        class P(VLLMPatch[Target]):
            @wrap
            def f(self, x): ...


def _unread(self, call, *args, **kwargs):
    return None


def _overwritten(self, call, x):
    call = x
    del call


async def _unawaited(self, call, x):
    return x


def test_a_class_spelled_with_a_dot_is_proposed_with_a_colon():
    """It names a module, so that ``call`` would have to come first."""
    with pytest.raises(DeclarationError, match=r'never reaches.*Next: write "vllm\.v1\.request:Request" if'):

        class P(VLLMPatch["vllm.v1.request.Request"]):
            @wrap
            def is_finished(self, call):
                return call()


@pytest.mark.parametrize("hook", [_unread, _overwritten, _unawaited])
def test_a_wrap_that_never_reads_call_is_refused(hook):
    """It never calls the original, whatever its parameters are called."""
    with pytest.raises(DeclarationError, match=r"'f' is marked @wrap but never reaches.*call its parameter 'call'"):

        class P(VLLMPatch[Target]):
            f = wrap(hook)


def _in_closure(self, call, x):
    return [lambda: call(x)]


def _by_locals(self, call, x):
    return locals()["call"](x)


def _two_at_once(self, call, x):
    return call, x


def _sometimes(self, call, x):
    if x:
        return call(x)


@functools.wraps(_unread)
def _decorated(*args, **kwargs):
    return args[1](*args[2:], **kwargs)


@pytest.mark.parametrize("hook", [_in_closure, _by_locals, _two_at_once, _sometimes, _decorated])
def test_a_wrap_that_may_reach_it_is_not(hook):
    """Only what is certain is refused."""

    class P(VLLMPatch[Target]):
        f = wrap(hook)

    assert P.declaration.hooks[0].kind == "wrap"


@pytest.mark.parametrize("mark", [replace, add])
def test_replacements_and_additions_do_not(mark):
    with pytest.raises(DeclarationError, match=r"marked @\w+ but mentions _original_f.*Next: mark it @wrap"):

        class P(VLLMPatch[Target]):
            @mark
            def f(self):
                return self._original_f()


def test_an_original_needs_a_hook():
    """``_original_x`` without a hook x, or with one that adds, has nothing to find."""
    with pytest.raises(DeclarationError, match=r"mentions _original_g.*does not wrap or replace 'g' \(there is: f\)"):

        class P(VLLMPatch[Target]):
            def f(self):
                return self._original_f() + self._original_g()

    with pytest.raises(DeclarationError, match=r"does not wrap or replace 'g'"):

        class Q(VLLMPatch[Target]):
            def f(self):
                return self._original_g()

            @add
            def g(self): ...


def test_an_original_is_read_as_an_attribute():
    """A bare name, an assignment and a string are refused, because none of them would be followed."""
    with pytest.raises(DeclarationError, match=r"'_original_f' in another way than reading.*write self\._original_f"):

        class P(VLLMPatch[Target]):
            def f(self):
                return _original_f()  # noqa: F821

    with pytest.raises(DeclarationError, match=r"in another way than"):

        class Q(VLLMPatch[Target]):
            def f(self):
                self._original_f = 3

    with pytest.raises(DeclarationError, match=r"'_original_f' as a string.*write self\._original_f"):

        class R(VLLMPatch[Target]):
            def f(self):
                return getattr(self, "_original_f")()  # noqa: B009


def test_modules_have_no_self():
    """A function of a module takes ``call``; ``_original_`` and super() are refused there."""
    with pytest.raises(DeclarationError, match=r"a function of a module has no self.*def reduce\(call, \.\.\.\)"):

        class P(VLLMPatch[functools]):
            def reduce(x):
                return x._original_reduce()

    with pytest.raises(DeclarationError, match=r"uses super.*module.*target the class"):

        class Q(VLLMPatch[functools]):
            def reduce(x):
                return super().reduce()


def test_min_vllm_version_narrows():
    """It adds to ``vllm=``, whichever of several stands first, and keeps the class."""

    @min_vllm_version("0.9.1")
    @min_vllm_version("0.10")
    class P(VLLMPatch[Target], vllm="<0.33"): ...

    assert P.declaration.vllm == "<0.33,>=0.10,>=0.9.1"

    @min_vllm_version("0.9.1")
    class Q(VLLMPatch[Target]): ...

    assert Q.declaration.vllm == ">=0.9.1"
    assert isinstance(Q, type)

    with pytest.raises(DeclarationError, match=r"'Target' is not a declared patch"):
        min_vllm_version("0.9.1")(Target)
    with pytest.raises(DeclarationError, match=r"not a part of a version range"):
        min_vllm_version("newest")(P)
