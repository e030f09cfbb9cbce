"""A hook takes every call that upstream's function takes, or is refused with both signatures."""

import pytest

from vllm_graft.errors import TargetError
from vllm_graft.patching import VLLMPatch, add, replace, wrap


class Upstream:
    def add_request(self, request, priority=0, *, trace=None): ...

    def plain(self, x): ...

    def open(self, *args, **kwargs): ...

    def named(self, *, a, b=2): ...

    @classmethod
    def made(cls, config): ...

    @staticmethod
    def free(x, y): ...

    def __eq__(self, other): ...


def hook(name, written, mark=wrap):
    """A patch with one hook, its parameters as written."""
    scope: dict[str, object] = {}
    exec(f"def {name}({written}): {'return call()' if 'call' in written else '...'}", scope)
    return type(VLLMPatch)("P", (VLLMPatch[Upstream],), {name: mark(scope[name])})


@pytest.mark.parametrize(
    ("name", "written", "problem"),
    [
        ("add_request", "self, call", "it has no place for 'request'"),
        ("add_request", "self, call, request", "it has no place for 'priority'"),
        ("add_request", "self, call, request, priority=0", "it has no place for 'trace'"),
        ("add_request", "self, call, req, priority=0, *, trace=None", "it cannot take 'request' by name"),
        ("add_request", "self, call, priority, request, *, trace=None", "it cannot take 'request' by name"),
        ("add_request", "self, call, *args", "it cannot take 'request' by name"),
        ("add_request", "self, call, **kwargs", "it has no place for 'request'"),
        ("add_request", "self, call, request, priority=0, extra=1, *, trace, more", "it needs 'more'"),
        (
            "add_request",
            "self, call, request, priority, *, trace=None",
            "it needs 'priority', which upstream's",
        ),
        ("add_request", "self, call, request, priority=0, *, trace", "it needs 'trace', which upstream's callers may"),
        ("named", "self, call, a, b", "it needs 'b', which upstream's callers may leave out"),
        ("plain", "self, call, x, y", "it needs 'y', which vLLM does not pass"),
        ("open", "self, call", "it has no place for '*args'"),
        ("open", "self, call, x, y=1", "it has no place for '*args'"),
        ("open", "self, call, *args", "it has no place for '**kwargs'"),
        ("__eq__", "self, call", "it has no place for 'other'"),
    ],
)
def test_what_cannot_take_upstreams_arguments_is_refused(engine, name, written, problem):
    """Both signatures are shown, and the target is left alone."""
    before = dict(vars(Upstream))
    with pytest.raises(TargetError) as caught:
        engine.apply([hook(name, written)])
    text = str(caught.value)
    assert f"{name!r} cannot take what vLLM passes: {problem}" in text
    assert f"The hook is {name}({written}), upstream's is {name}(self" in text
    assert "Next: give the hook upstream's parameters, or *args and **kwargs" in text
    assert dict(vars(Upstream)) == before


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("add_request", "self, call, request, priority=0, *, trace=None"),
        ("add_request", "self, call, request, *args, **kwargs"),
        ("add_request", "self, call, request, priority=0, more=None, **kwargs"),
        ("add_request", "self, call, *args, **kwargs"),
        ("open", "self, call, x, *args, **kwargs"),
        ("named", "self, call, a, b=2"),
        ("__eq__", "self, call, that"),
    ],
)
def test_what_takes_every_call_is_applied(engine, name, written):
    assert [state.state for state in engine.apply([hook(name, written)])] == ["applied"]


def test_a_replacement_is_held_to_the_same(engine):
    with pytest.raises(TargetError, match=r"it has no place for 'x'. The hook is plain\(self\), upstream's is plain\("):
        engine.apply([hook("plain", "self", replace)])
    engine.apply([hook("plain", "self, x", replace)])


def test_an_addition_has_nobody_to_agree_with(engine):
    engine.apply([hook("new", "self, whatever", add)])


def test_classmethods_staticmethods_and_originals(engine):
    """Whether there is a self, and however the layer beneath is reached."""

    class ByClass(VLLMPatch[Upstream], name="a"):
        @classmethod
        def made(cls, call):
            return call()

    class ByNone(VLLMPatch[Upstream], name="b"):
        @staticmethod
        def free(call, x):
            return call()

    class ByOriginal(VLLMPatch[Upstream], name="c"):
        def plain(self):
            return self._original_plain(1)

    for patch, missing in ((ByClass, "config"), (ByNone, "y"), (ByOriginal, "x")):
        with pytest.raises(TargetError, match=f"it has no place for '{missing}'"):
            engine.apply([patch])


def test_a_long_default_is_cut(engine, make):
    module = make("def f(x, table=tuple(range(100))): ...")

    class P(VLLMPatch[module]):
        @wrap
        def f(call):
            return call()

    with pytest.raises(TargetError, match=r"upstream's is f\(x, table=\.\.\.\)"):
        engine.apply([P])


@pytest.mark.parametrize(
    ("get", "put", "problem"),
    [
        ("self, call, extra", "self, call, value", "it needs 'extra', which vLLM does not pass"),
        ("self, call", "self, call, value, extra", "it needs 'extra', which vLLM does not pass"),
        ("self, call", "self, call", "it has no place for 'value'"),
        ("self, call", "self, call, anything", ""),
        ("self, call, extra=None", "self, *args", ""),
    ],
)
def test_accessors_take_the_object_and_a_value(engine, make, get, put, problem):
    module = make("""
        class C:
            @property
            def p(self): return 1
            @p.setter
            def p(self, value): ...
    """)
    scope: dict[str, object] = {}
    exec(f"def get({get}): ...\ndef put({put}): return self._original_p", scope)
    patch = type(VLLMPatch)("P", (VLLMPatch[module.C],), {"p": wrap(property(scope["get"], scope["put"]))})
    if not problem:
        engine.apply([patch])
        return
    with pytest.raises(TargetError, match=problem):
        engine.apply([patch])


def test_one_function_as_getter_and_setter(engine, make):
    """It is checked as both: as a getter it gets the object alone."""
    module = make("""
        class C:
            p = property(lambda self: 1, lambda self, value: None)
    """)

    def access(self, value):
        return value

    patch = type(VLLMPatch)("P", (VLLMPatch[module.C],), {"p": replace(property(access, access))})
    with pytest.raises(TargetError, match="it needs 'value', which vLLM does not pass"):
        engine.apply([patch])


def test_a_function_made_by_a_decorator(engine, make):
    """What a decorator took over with ``functools.wraps`` shows its own parameters; a bare wrapper takes anything."""
    module = make("""
        import functools
        def logged(function):
            @functools.wraps(function)
            def over(*args, **kwargs): return function(*args, **kwargs)
            return over
        def bare(function):
            def over(*args, **kwargs): return function(*args, **kwargs)
            return over
        @logged
        def f(x): return x
        @bare
        def g(x): return x
    """)

    class OnF(VLLMPatch[module], name="f"):
        @wrap
        def f(call):
            return call()

    class OnG(VLLMPatch[module], name="g"):
        @wrap
        def g(call, x):
            return call()

    with pytest.raises(TargetError, match=r"it has no place for 'x'"):
        engine.apply([OnF])
    engine.apply([OnG])
