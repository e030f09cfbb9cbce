"""What may be done to an attribute: the marks are held to what the target has."""

import asyncio
import dataclasses
import functools

import pytest

from vllm_graft.errors import TargetError
from vllm_graft.patching import VLLMPatch, add, replace, wrap


class Base:
    def inherited(self):
        return "base"


class Target(Base):
    limit = 3

    class Inner: ...

    def plain(self):
        return 1

    async def coroutine(self):
        return 1

    def generator(self):
        yield 1

    async def stream(self):
        yield 1

    @classmethod
    def cls_method(cls):
        return 1

    @staticmethod
    def static():
        return 1

    @property
    def prop(self):
        return 1


def refused(engine, body, **keywords):
    patch = type(VLLMPatch)("P", (VLLMPatch[Target],), body)
    before = dict(vars(Target))
    with pytest.raises(TargetError) as caught:
        engine.apply([patch])
    assert dict(vars(Target)) == before
    text = str(caught.value)
    assert text.startswith("patch 'P' (")
    assert f"on {Target.__module__}:Target: " in text
    assert ". Next: " in text
    return text


@pytest.mark.parametrize("mark", [wrap, replace])
def test_nothing_to_wrap_or_replace(engine, mark):
    """A missing name is refused with the nearest one there is."""

    def plian(self, call):
        return call()

    text = refused(engine, {"plian": mark(plian)})
    assert f"there is no 'plian' to {mark.__name__} (did you mean 'plain'?). Next: compare with the installed" in text


def test_a_field_without_a_default_is_no_attribute_of_the_class(engine):
    @dataclasses.dataclass
    class Output:
        req_ids: list[str]

    class P(VLLMPatch[Output]):
        req_ids = replace([])

    with pytest.raises(TargetError, match=r"there is no 'req_ids' to replace: .*Output declares it as a field of its"):
        engine.apply([P])


def test_what_every_object_has_counts_as_absent(engine):
    """``object`` has an __init__ and a __repr__ that nobody means: they are added, not wrapped."""
    text = refused(engine, {"__repr__": wrap(lambda self, call: call())})
    assert "Target has no '__repr__' of its own to wrap, only the one that every object has" in text
    assert "did you mean" not in text
    assert "Next: mark it @add" in text

    class P(VLLMPatch[Target]):
        @add
        def __repr__(self):
            return "ours"

    engine.apply([P])
    assert repr(Target()) == "ours"
    engine.revert(P)
    assert repr(Target()).startswith("<")


@pytest.mark.parametrize("name", ["plain", "inherited", "limit", "Inner"])
def test_adding_what_is_there(engine, name):
    text = refused(engine, {name: add(lambda self: None)})
    assert f"it adds {name!r}, but the target already has one. Next: mark it @wrap or @replace" in text


def test_new_cannot_be_added(engine):
    """Python cannot take ``__new__`` off a class again."""
    assert "adds '__new__'" in refused(engine, {"__new__": lambda cls: object.__new__(cls)})


@pytest.mark.parametrize(
    ("name", "value", "theirs", "ours"),
    [
        ("prop", lambda self: 1, "property", "function"),
        ("plain", property(lambda self: 1), "function", "property"),
        ("Inner", lambda self: 1, "class", "function"),
        ("Inner", 3, "class", "value"),
        ("plain", 3, "function", "value"),
        ("limit", lambda self: 1, "value", "function"),
        ("cls_method", lambda cls: 1, "classmethod", "function"),
        ("static", lambda: 1, "staticmethod", "function"),
        ("plain", classmethod(lambda cls: 1), "function", "classmethod"),
    ],
)
def test_another_form(engine, name, value, theirs, ours):
    """A function in the place of a class, a value in the place of a method, and the like are refused."""
    assert f"{name!r} is a {theirs} on the target but a {ours} in the patch" in refused(engine, {name: value})


async def a_coroutine(self): ...


def a_generator(self):
    yield


async def a_stream(self):
    yield


KINDS = {
    "plain": ("plain", lambda self: 1),
    "coroutine": ("coroutine", a_coroutine),
    "generator": ("generator", a_generator),
    "stream": ("async generator", a_stream),
}


@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("ours", KINDS)
def test_another_kind_of_function(engine, theirs, ours):
    """Coroutine, generator, async generator and plain functions do not stand in for each other."""
    if theirs == ours:
        patch = type(VLLMPatch)("P", (VLLMPatch[Target],), {theirs: KINDS[ours][1]})
        engine.apply([patch])
        return
    text = refused(engine, {theirs: KINDS[ours][1]})
    a, b = KINDS[theirs][0], KINDS[ours][0]
    assert f"{theirs!r} is a {a} function on the target but a {b} function in the patch" in text
    assert f"Next: write the hook as a {a} function" in text


def test_a_coroutine_beneath_a_plain_decorator(engine):
    """Callers await what the decorator returns, so a coroutine hook fits although the outer function is plain."""

    def decorated(function):
        @functools.wraps(function)
        def outer(*args):
            return function(*args)

        return outer

    class Local:
        @decorated
        async def f(self):
            return 1

    class P(VLLMPatch[Local]):
        @wrap
        async def f(self, call):
            return await call() + 1

    engine.apply([P])
    assert asyncio.run(Local().f()) == 2


def test_an_accessor_that_is_not_there(engine):
    """A setter that takes ``call`` has nothing to be given where upstream's property is read-only."""
    prop = property(lambda self, call: call(), lambda self, call, value: call(value))
    assert "the setter of 'prop' takes 'call', but the target's property has no setter" in refused(
        engine, {"prop": prop}
    )


def test_an_original_of_what_turned_out_to_be_an_addition(engine):
    """``_original_x`` of a hook without a mark is refused where the target has no x."""

    def f(self):
        return self._original_gone()

    text = refused(engine, {"f": f, "gone": lambda self: 1})
    assert "'f' mentions _original_gone, but the target has no 'gone'" in text
