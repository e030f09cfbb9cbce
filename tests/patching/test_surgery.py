"""What is set on a target: plain functions that behave, and present themselves, like upstream's."""

import asyncio
import functools
import inspect
import pickle
import types

import pytest

from vllm_graft.patching import VLLMPatch, add, replace, wrap
from vllm_graft.patching.surgery import transplant


class Base:
    def greet(self, name="you"):
        return f"hello {name}"


class Target(Base):
    _secret = "s"

    def __init__(self, start=0):
        self.value = start

    def __len__(self):
        return 5

    def f(self, x, *, scale: int = 1) -> int:
        """Upstream's own words."""
        return x * scale

    def g(self):
        return "g"

    def _private(self):
        return "private"

    async def coroutine(self, x):
        await asyncio.sleep(0)
        return x

    def generator(self, n):
        got = []
        for i in range(n):
            got.append((yield i))
        return got

    async def stream(self, n):
        self.closed = False
        try:
            for i in range(n):
                try:
                    got = yield i
                except KeyError:
                    got = "caught"
                self.last = got
        finally:
            await asyncio.sleep(0)
            self.closed = True

    @classmethod
    def named(cls, x):
        return cls.__name__, x

    @staticmethod
    def static(x):
        return x

    @property
    def prop(self):
        """The property's words."""
        return self.value

    @prop.setter
    def prop(self, value):
        self.value = value

    @functools.cached_property
    def cached(self):
        return [1]


class Sub(Target):
    pass


def test_call_is_the_next_layer_bound(engine):
    """``call`` takes the arguments without self, positional or by keyword."""

    class P(VLLMPatch[Target]):
        @wrap
        def f(self, call, x, **kwargs):
            return call(x, **kwargs), call(x=x)

    engine.apply([P])
    assert Target().f(3, scale=2) == (6, 3)


def test_original_is_the_next_layer_as_a_method(engine):
    """``self._original_f`` works in nested functions too, and for another method of the same patch."""

    class P(VLLMPatch[Target]):
        def f(self, x, **kwargs):
            return (
                [self._original_f(i, **kwargs) for i in range(x)],
                (lambda: self._original_f(x))(),
                self._original_g(),
            )

        @replace
        def g(self):
            return "replaced"

    engine.apply([P])
    assert Target().f(3, scale=2) == ([0, 2, 4], 3, "g")
    assert Target().g() == "replaced"


def test_two_layers_of_either_form_never_meet(engine):
    """Layers that all say ``_original_f`` find their own neighbours; nothing recurses."""

    class A(VLLMPatch[Target]):
        def f(self, x, *, scale=1):
            return f"A({self._original_f(x)})"

    class B(VLLMPatch[Target]):
        def f(self, x, *, scale=1):
            return f"B({self._original_f(x)})"

    class C(VLLMPatch[Target]):
        def f(self, call, x, *, scale=1):
            return f"C({call(x)})"

    class D(VLLMPatch[Target]):
        def f(self, x, *, scale=1):
            return f"D({self._original_f(x)})"

    engine.apply([A, B, C, D])
    assert Target().f(1) == Sub().f(1) == "D(C(B(A(1))))"
    engine.revert(B)
    assert Target().f(1) == "D(C(A(1)))"


def test_super_starts_from_the_target(engine):
    """Zero-argument super() works in wraps, replacements, additions, classmethods and inner functions."""

    class P(VLLMPatch[Target]):
        @add
        def greet_all(self):
            return [super(__class__, self).greet(), super().greet("all"), (lambda: __class__)()]  # noqa: UP008

        @classmethod
        def named(cls, call, x):
            return call(x), super().__init_subclass__()

        def __init__(self, call, *args, **kwargs):
            super().__init__()
            call(*args, **kwargs)

    engine.apply([P])
    assert Target(4).value == 4
    assert Target().greet_all() == ["hello you", "hello all", Target]
    assert Sub().greet_all()[1] == "hello all"
    assert Sub.named(1) == (("Sub", 1), None)


def test_inherited_names_are_shadowed(engine):
    """Patching a name the class inherits sets it there; what a base becomes later is still what runs."""

    class OnTarget(VLLMPatch[Target]):
        @wrap
        def greet(self, call, *args, **kwargs):
            return call(*args, **kwargs) + "!"

    class OnBase(VLLMPatch[Base]):
        @wrap
        def greet(self, *args, **kwargs):
            return self._original_greet(*args, **kwargs).upper()

    engine.apply([OnTarget])
    assert Target().greet("x") == "hello x!"
    assert Base().greet("x") == "hello x"
    engine.apply([OnBase])
    assert Target().greet("x") == "HELLO X!"
    engine.revert(OnBase)
    assert Target().greet("x") == "hello x!"
    engine.revert(OnTarget)
    assert "greet" not in vars(Target)


def test_inherited_forms(engine):
    """Inherited classmethods, staticmethods, properties and cached properties are reached like functions."""

    class P(VLLMPatch[Sub]):
        @classmethod
        def named(cls, call, x):
            return call(x), cls._original_named(x)

        @staticmethod
        def static(call, x):
            return call(x) + 1

        @property
        def prop(self):
            return self._original_prop + 1

        @property
        def cached(self, call):
            return call()

    engine.apply([P])
    sub = Sub(1)
    assert Sub.named(1) == (("Sub", 1), ("Sub", 1))
    assert Sub.static(1) == sub.static(1) == 2
    sub.prop = 5
    assert sub.prop == 6
    assert sub.cached is sub.cached
    engine.revert(P)
    assert not {"named", "static", "prop", "cached"} & set(vars(Sub))


def test_special_and_private_names(engine):
    class P(VLLMPatch[Target]):
        def __init__(self, *args, **kwargs):
            self._original___init__(*args, **kwargs)
            self.value += 1

        def __len__(self, call):
            return call() * 2

        def _private(self, call):
            return call() + self._secret

        def __call__(self):
            return "called"

    engine.apply([P])
    one = Target(1)
    assert (one.value, len(one), one._private(), one()) == (2, 10, "privates", "called")
    engine.revert(P)
    assert not callable(Target())


def test_classmethods_and_staticmethods(engine):
    class P(VLLMPatch[Target]):
        @classmethod
        def named(cls, *args, **kwargs):
            return ("wrapped", *cls._original_named(*args, **kwargs))

        @staticmethod
        @replace
        def static(x):
            return -x

    engine.apply([P])
    assert Sub.named(1) == Sub().named(1) == ("wrapped", "Sub", 1)
    assert Target.static(1) == Target().static(1) == -1
    assert isinstance(vars(Target)["named"], classmethod)
    assert isinstance(vars(Target)["static"], staticmethod)


def test_properties(engine):
    """A wrap keeps the accessors it does not mention, and the docstring; a replacement is the whole property."""

    class W(VLLMPatch[Target]):
        @property
        def prop(self, call):
            return call() * 10

    class S(VLLMPatch[Target]):
        @property
        def prop(self):
            return self._original_prop + 1

        @prop.setter
        def prop(self, call, value):
            call(value + 100)

    class R(VLLMPatch[Target]):
        @property
        @replace
        def prop(self):
            return "fixed"

    one = Target(1)
    engine.apply([W])
    one.prop = 2
    assert one.prop == 20
    assert Target.prop.__doc__ == "The property's words."
    engine.apply([S])
    one.prop = 3
    assert one.prop == 1031
    engine.revert(W)
    engine.revert(S)
    engine.apply([R])
    assert one.prop == "fixed"
    with pytest.raises(AttributeError):
        one.prop = 1
    assert [state.hits for state in engine.report()] == [0, 0, 0]


def test_cached_properties(engine):
    """A property stands around a cached one, so that instances made before are reached too."""

    class P(VLLMPatch[Target]):
        @property
        @wrap
        def cached(self):
            return [*self._original_cached, 2]

    old = Target()
    assert old.cached == [1]
    engine.apply([P])
    assert old.cached == Target().cached == [1, 2]
    original = vars(Target)["cached"]
    engine.revert(P)
    assert original is not vars(Target)["cached"]
    assert old.cached == [1]


def test_values(engine):
    class P(VLLMPatch[Target]):
        _secret = None
        brand_new = (1, 2)

    engine.apply([P])
    assert (Target()._secret, Target.brand_new) == (None, (1, 2))
    engine.revert(P)
    assert Target._secret == "s"
    assert not hasattr(Target, "brand_new")


def test_coroutines(engine):
    """A wrapped, replaced or added coroutine function is one for whoever asks."""

    class P(VLLMPatch[Target]):
        @wrap
        async def coroutine(self, call, x):
            return await call(x) + 1

        @add
        async def other(self):
            return 3

    class Q(VLLMPatch[Target]):
        async def coroutine(self, x):
            return await self._original_coroutine(x) * 10

    engine.apply([P, Q])
    assert inspect.iscoroutinefunction(Target.coroutine)
    assert inspect.iscoroutinefunction(Target.other)
    assert asyncio.run(Target().coroutine(1)) == 20
    assert asyncio.run(Target().other()) == 3
    assert inspect.iscoroutinefunction(Target.other)
    assert [state.hits for state in engine.report()] == [1, 1, 1]


def test_generators(engine):
    """What is sent reaches upstream's generator, and what it returns comes back."""

    class P(VLLMPatch[Target]):
        @wrap
        def generator(self, call, n):
            return (yield from call(n + 1))

    engine.apply([P])
    assert inspect.isgeneratorfunction(Target.generator)
    running = Target().generator(1)
    assert [next(running), running.send("a")] == [0, 1]
    with pytest.raises(StopIteration) as end:
        running.send("b")
    assert end.value.value == ["a", "b"]


def test_async_generators(engine):
    """Items, sent values, thrown exceptions, exhaustion and closing all pass through the layer."""

    class P(VLLMPatch[Target]):
        async def stream(self, n):
            async for item in self._original_stream(n):
                yield item * 10

    class R(VLLMPatch[Target]):
        @add
        async def added(self):
            try:
                got = yield 1
                try:
                    yield got
                except KeyError:
                    yield "caught"
            finally:
                self.closed = True

    engine.apply([P, R])
    one = Target()
    assert inspect.isasyncgenfunction(Target.stream)

    async def items():
        return [item async for item in one.stream(3)]

    async def talk():
        stream = one.added()
        first = await anext(stream)
        second = await stream.asend("sent")
        third = await stream.athrow(KeyError())
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return first, second, third

    async def close():
        one.closed = False
        engine.recount()
        stream = one.added()
        await anext(stream)
        await stream.aclose()
        return one.closed

    async def fail():
        engine.recount()
        stream = one.added()
        await anext(stream)
        with pytest.raises(ValueError, match=r"up"):
            await stream.athrow(ValueError("up"))

    assert asyncio.run(items()) == [0, 10, 20]
    assert asyncio.run(talk()) == (1, "sent", "caught")
    assert asyncio.run(close()) is True
    asyncio.run(fail())


def test_functions_present_themselves_as_upstreams(engine):
    """Name, module, docstring and signature stay; ``__wrapped__`` is never set."""
    signature = inspect.signature(Target.f)

    def decorated(function):
        @functools.wraps(function)
        def outer(*args, **kwargs):
            return function(*args, **kwargs)

        return outer

    class P(VLLMPatch[Target]):
        @wrap
        @decorated
        def f(self, call, *args, **kwargs):
            """Ours."""
            return call(*args, **kwargs)

        @decorated
        def g(self, extra=1):
            """Ours."""
            return super().greet(), self._original_f(1)

        @add
        def added(self, x):
            """Added."""

    engine.apply([P])
    for _ in range(2):
        f, g, added = Target.f, Target.g, Target.added
        assert (f.__name__, f.__qualname__, f.__module__) == ("f", "Target.f", __name__)
        assert f.__doc__ == "Upstream's own words."
        assert inspect.signature(f) == signature
        assert list(inspect.signature(Target().f).parameters) == ["x", "scale"]
        assert list(inspect.signature(g).parameters) == ["self", "extra"]
        assert (added.__qualname__, added.__module__, added.__doc__) == ("Target.added", __name__, "Added.")
        for function in (f, g, added):
            assert type(function) is types.FunctionType
            assert not hasattr(function, "__wrapped__")
        assert Target().f(2, scale=3) == 6
        assert Target().g() == ("hello you", 1)
        Target().added(1)


def test_pickling_by_name_still_works(engine):
    """A patched function goes by its name, so it arrives as whatever stands there."""

    class P(VLLMPatch[Target]):
        def f(self, call, x, *, scale=1):
            return call(x)

    engine.apply([P])
    assert pickle.loads(pickle.dumps(Target.f)) is Target.f


def test_functions_of_modules(engine, make):
    """``call`` stands first; a staticmethod in the body means the function; values are set."""
    module = make("""
        LIMIT = 3
        def f(x, y=1): return x + y + LIMIT
        async def g(): return LIMIT
    """)

    class P(VLLMPatch[module]):
        LIMIT = 10

        def f(call, x, *args, **kwargs):
            return call(x, *args, **kwargs) * 2

        @staticmethod
        async def g(call):
            return await call() + 1

        @add
        def h(x):
            return -x

    engine.apply([P])
    assert (module.f(1, y=2), asyncio.run(module.g()), module.h(1)) == (26, 11, -1)
    assert (module.f.__module__, module.h.__module__, module.h.__qualname__) == (module.__name__, module.__name__, "h")
    engine.revert(P)
    assert (module.f(1), asyncio.run(module.g()), hasattr(module, "h")) == (5, 3, False)


def test_a_copy_shares_nothing_it_must_not(engine):
    """The patch's own functions stay as written, whatever is made of them; recursive closures are copied once."""

    class P(VLLMPatch[Target]): ...

    def outer():
        def inner(self, n):
            return inner(self, n - 1) if n else self._original_f(1)

        return inner

    inner = outer()
    copy = transplant(inner, P, Target, {"_original_f": "_elsewhere_f"})
    assert "_original_f" in inner.__code__.co_names
    assert copy.__closure__[0].cell_contents is copy
    assert inner.__closure__[0].cell_contents is inner
    assert copy(types.SimpleNamespace(_elsewhere_f=lambda x: x + 1), 3) == 2


def test_a_wrap_keeps_the_functions_attributes(engine, make):
    """As ``functools.wraps`` does: what a function is called with is not all that its users read."""
    module = make("""
        import abc
        import functools

        def f(x):
            return x

        f.tag = "mine"

        @functools.singledispatch
        def show(x):
            return "any"

        class Abstract:
            @property
            @abc.abstractmethod
            def p(self): ...

            @abc.abstractmethod
            def m(self): ...

            m.seen = [1]

        class Below(Abstract):
            pass
    """)

    class P(VLLMPatch[module]):
        @wrap
        def f(call, x):
            return -call(x)

        @wrap
        def show(call, x):
            return f"<{call(x)}>"

    class Q(VLLMPatch[module.Abstract]):
        @wrap
        def m(self, call):
            return call()

        @wrap
        @property
        def p(self, call):
            return call()

    class R(VLLMPatch[module.Below]):
        @wrap
        def m(self, call):
            return call()

    before = {**vars(module), **vars(module.Abstract)}
    engine.apply([P, Q, R])
    assert module.f.tag == "mine"
    module.show.register(int, lambda x: "int")
    assert (module.show(1), module.show("x")) == ("<int>", "<any>")
    assert not hasattr(module.show, "__wrapped__")
    assert module.Abstract.m.__isabstractmethod__
    assert vars(module.Abstract)["p"].__isabstractmethod__
    assert module.Abstract.m.seen is module.Below.m.seen
    engine.revert_all()
    assert all({**vars(module), **vars(module.Abstract)}[name] is value for name, value in before.items())
    assert "m" not in vars(module.Below)


def test_a_wraps_own_attributes_count(engine, make):
    """An author who sets one means it."""
    module = make("def f():\n    return 1\nf.tag, f.other = 'upstream', 2\n")

    def hook(call):
        return call()

    hook.tag = "hook"
    engine.apply([type(VLLMPatch)("P", (VLLMPatch[module],), {"f": wrap(hook)})])
    assert (module.f.tag, module.f.other, module.f()) == ("hook", 2, 1)


def test_special_functions_become_class_methods_as_in_a_class_body(engine):
    """Python does so for these two in a class statement only."""

    class Plain:
        pass

    class P(VLLMPatch[Plain]):
        @add
        def __init_subclass__(cls, **kwargs):
            cls.seen = True

        @add
        def __class_getitem__(cls, item):
            return cls, item

    engine.apply([P])
    assert type("Child", (Plain,), {}).seen is True
    assert Plain[3] == (Plain, 3)
    engine.revert_all()
    assert not {"__init_subclass__", "__class_getitem__"} & vars(Plain).keys()
