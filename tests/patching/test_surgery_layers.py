"""The functions over a hook: the hook's own parameters, its place in the source, and nothing that need not be there."""

import asyncio
import functools
import inspect
import traceback
import types

import pytest

from vllm_graft.patching import VLLMPatch, replace, wrap
from vllm_graft.patching.surgery import code_under, count_calls, inject_call, no_hit

SENTINEL = object()


def positional(self, call, a, b=2):
    return call, (a, b)


def only_positional(self, call, a, /, b=2):
    return call, (a, b)


def only_named(self, call, a, *, c, d=SENTINEL):
    return call, (a, c, d)


def packed(self, call, *args, **kwargs):
    return call, (args, kwargs)


def some_packed(self, call, a=1, *args, c=3, **kwargs):
    return call, (a, args, c, kwargs)


def others_packed(self, call, a, **kwargs):
    return call, (a, kwargs)


def with_a_default(self, call=None, a=1, b=SENTINEL):
    return call, (a, b)


def odd_names(me, call, layer, over, inner, item=1):
    return call, (layer, over, inner, item)


def taken_names(self, call, _graft_hit, _graft_function=2):
    return call, (_graft_hit, _graft_function)


HOOKS = [
    positional, only_positional, only_named, packed, some_packed, others_packed, with_a_default, odd_names, taken_names,
]  # fmt: skip

CALLS = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, 3), {}),
    ((1, 2, 3, 4), {}),
    ((1, 2, 3, 4, 5), {}),
    ((), {"a": 1}),
    ((), {"a": 1, "b": 5}),
    ((1,), {"c": 3}),
    ((1,), {"c": 3, "d": 4}),
    ((1,), {"a": 1}),
    ((1, 2), {"inner": 3}),
    ((1,), {"_graft_function": 3}),
    ((1,), {"e": 5}),
]


def outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except TypeError:
        return TypeError


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_a_hook_sees_what_it_would_see_without_a_layer(hook, args, kwargs):
    """Positional, named, packed and left-out arguments all arrive as if the hook were called with ``call`` itself."""
    me, hits = object(), []

    def upstream(self, *args, **kwargs):
        return self, args, kwargs

    layer = inject_call(hook, upstream, 1, lambda: hits.append(1))
    expected = outcome(hook, me, None, *args, **kwargs)
    found = outcome(layer, me, *args, **kwargs)
    if expected is TypeError:
        assert found is TypeError
        return
    call, seen = found
    assert seen == expected[1]
    assert call(5, x=6) == (me, (5,), {"x": 6})
    assert hits == [1]
    bare = count_calls(hook, lambda: hits.append(2))
    assert bare(me, None, *args, **kwargs) == expected
    assert hits == [1, 2]


def test_an_argument_of_upstreams_named_call():
    """What callers say by that name is no business of the hook's parameter."""
    layer = inject_call(packed, lambda self: None, 1, no_hit)
    assert layer(None, 1, call=2)[1] == ((1,), {"call": 2})


def test_packed_arguments_are_the_hooks_own():
    """It may change them, hand them to inner functions and use them late; the caller's dictionary stays as it was."""

    def hook(self, call, *args, key=0, **kwargs):
        kwargs["more"] = lambda: (args, key, kwargs)
        yield call(*args)
        yield kwargs["more"]()

    given = {"x": 1}
    layer = inject_call(hook, lambda self, *args: args, 1, no_hit)
    assert inspect.isgeneratorfunction(layer)
    first, (args, key, kwargs) = layer(None, 1, 2, key=3, **given)
    assert (first, args, key, kwargs["x"]) == ((1, 2), (1, 2), 3, 1)
    assert given == {"x": 1}


def test_the_code_that_runs():
    """Whether a hook is running is asked of the code under its layer."""
    frames = []

    def hook(self, *args):
        frames.append(inspect.currentframe())

    layer = count_calls(hook, lambda: None)
    layer(None, 1)
    assert frames[0].f_code is code_under(layer)
    assert code_under(layer) is not code_under(hook)
    assert code_under(hook) is hook.__code__


def test_call_comes_first_where_there_is_no_self():
    def hook(call, a, *, b=2):
        return call(a) + b

    layer = inject_call(hook, lambda a: a * 10, 0, no_hit)
    assert (layer(1), layer(a=1, b=3)) == (12, 13)
    assert inspect.getfullargspec(layer).kwonlydefaults == {"b": 2}


def test_self_may_be_anything():
    """A method taken from its class can be called on what is no instance of it, and on None."""

    def hook(self, call, x):
        return call(x)

    async def later(self, call, x):
        return await call(x)

    async def upstream(self, x):
        return self, x

    for me in (None, 0, types.SimpleNamespace()):
        assert inject_call(hook, lambda self, x: (self, x), 1, no_hit)(me, 1) == (me, 1)
        assert asyncio.run(inject_call(later, upstream, 1, no_hit)(me, 1)) == (me, 1)


def test_a_decorator_that_hides_call():
    """The parameters are then the decorator's business; one that lets ``call`` not through fails when it is called."""

    def packing(function):
        @functools.wraps(function)
        def outer(*args, **kwargs):
            return function(*args, **kwargs)

        return outer

    def dropping(function):
        @functools.wraps(function)
        def outer(self):
            return function(self)

        return outer

    def hook(self, call, x):
        return call(x)

    def upstream(self, x):
        return x + 1

    assert inject_call(packing(hook), upstream, 1, no_hit)(None, x=1) == 2
    with pytest.raises(TypeError, match=r"takes 1 positional argument but 2 were given"):
        inject_call(dropping(hook), upstream, 1, no_hit)(None)


def test_nothing_stands_over_what_is_not_counted():
    def hook(self):
        return self

    assert count_calls(hook, no_hit) is hook


class Base:
    def inherited(self, x):
        return x


class Target(Base):
    def f(self, x):
        return 1 / x

    async def stream(self, x):
        yield 1 / x


class Patch(VLLMPatch[Target]):
    @wrap
    def f(self, call, x):
        return call(x)

    @wrap
    async def stream(self, call, x):
        async for item in call(x):
            yield item


def test_a_layer_stands_where_its_hook_does(engine):
    """A traceback leads through the plugin's file alone, and whoever asks for the source gets what runs."""
    engine.apply([Patch])
    with pytest.raises(ZeroDivisionError) as caught:
        Target().f(0)
    steps = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [(step.name, step.line) for step in steps] == [
        ("layer", "@wrap"),
        ("f", "return call(x)"),
        ("f", "return 1 / x"),
    ]
    assert {step.filename for step in steps} == {__file__}
    assert "return call(x)" in inspect.getsource(Target.f)

    async def drain():
        async for _ in Target().stream(0):
            pass

    with pytest.raises(ZeroDivisionError) as caught:
        asyncio.run(drain())
    (layer,) = [step for step in traceback.extract_tb(caught.value.__traceback__) if step.name == "layer"]
    assert layer.filename == __file__
    assert layer.line == "@wrap"


def test_wrong_arguments_are_upstreams_fault_to_name(engine):
    """The error has the name of the method that was called, and the call that did not happen is not counted."""
    engine.apply([Patch])
    with pytest.raises(TypeError, match=r"^Target\.f\(\) missing 1 required positional argument: 'x'$"):
        Target().f()
    assert [state.hits for state in engine.report()] == [0, 0]


def test_hooks_from_one_text_do_not_share_code(engine):
    """The interpreter specialises code objects: shared ones would slow each other down."""

    class Other(VLLMPatch[Target], name="other"):
        @wrap
        def f(self, call, x):
            return call(x)

    engine.apply([Patch])
    one = Target.f
    engine.apply([Other])
    assert Target.f.__code__ is not one.__code__


def test_an_inherited_method_is_found_anew(engine):
    """By either form: what stands on the base at the call is what runs, and it is given the instance."""

    class ByCall(VLLMPatch[Target], name="by-call"):
        @wrap
        def inherited(self, call, x):
            return call(x), call.__self__ is self

    class ByName(VLLMPatch[Target], name="by-name"):
        @wrap
        def inherited(self, x):
            return self._original_inherited(x)

    class OnBase(VLLMPatch[Base]):
        @replace
        def inherited(self, x):
            return -x

    engine.apply([ByCall, ByName])
    assert Target().inherited(1) == (1, True)
    engine.apply([OnBase])
    assert Target().inherited(1) == (-1, True)
    engine.revert(ByCall)
    assert Target().inherited(1) == -1
