"""The onion on one attribute: order, exact removal of any layer, conflicts, and counting."""

import itertools
import threading

import pytest

from vllm_graft.errors import ConflictError
from vllm_graft.patching import Engine, LocalHitCounter, VLLMPatch, add, replace, wrap


class Target:
    def f(self):
        return "upstream"


def wrapper(letter):
    if letter in "ACE":

        class P(VLLMPatch[Target], name=letter):
            def f(self):
                return f"{letter}({self._original_f()})"
    else:

        class P(VLLMPatch[Target], name=letter):
            def f(self, call):
                return f"{letter}({call()})"

    return P


class Instead(VLLMPatch[Target], name="instead"):
    @replace
    def f(self):
        return "instead"


A, B, C = (wrapper(letter) for letter in "ABC")


def expected(order):
    text = "instead" if Instead in order else "upstream"
    for patch in order:
        if patch is not Instead:
            text = f"{patch.declaration.name}({text})"
    return text


@pytest.mark.parametrize("applied", [*itertools.permutations([A, B, Instead])])
@pytest.mark.parametrize("reverted", [*itertools.permutations([A, B, Instead])])
def test_any_order_of_applying_and_reverting(engine, applied, reverted):
    """Wraps lie in the order of application, a replacement beneath them all; at the end the same object is back."""
    before = vars(Target)["f"]
    keys = list(vars(Target))
    active = []
    for patch in applied:
        engine.apply([patch])
        active.append(patch)
        assert Target().f() == Target().f() == expected(active)
    for patch in reverted:
        engine.revert(patch)
        active.remove(patch)
        assert Target().f() == Target().f() == expected(active)
    assert vars(Target)["f"] is before
    assert list(vars(Target)) == keys


def test_reverting_the_top_brings_the_same_layer_back(engine):
    """What was there before a layer came is, object for object, there after it went."""
    engine.apply([A])
    one = vars(Target)["f"]
    keys = set(vars(Target))
    engine.apply([B, C])
    engine.revert(C)
    engine.revert(B)
    assert vars(Target)["f"] is one
    assert set(vars(Target)) == keys


def test_applied_again_a_layer_comes_out_on_top(engine):
    engine.apply([A, B])
    engine.revert(A)
    engine.apply([A])
    assert Target().f() == "A(B(upstream))"


def test_two_replacements(engine):
    """Only one could run: the error names both."""

    class Other(VLLMPatch[Target], name="other"):
        def f(self):
            return "other"

    engine.apply([Instead])
    with pytest.raises(ConflictError) as caught:
        engine.apply([Other])
    text = str(caught.value)
    assert text.startswith("patch 'other' (")
    assert "it replaces 'f', which patch 'instead' (" in text
    assert "replaces already: only one of them could run. Next: leave out 'other' or 'instead', or let one" in text
    assert Target().f() == "instead"
    with pytest.raises(ConflictError):
        Engine().apply([A, Instead, Other])


def test_two_additions_and_a_wrap_of_an_addition(engine):
    """A patch may wrap what another adds; then that one cannot go first."""

    class Adds(VLLMPatch[Target], name="adds"):
        @add
        def g(self):
            return "g"

    class AddsToo(VLLMPatch[Target], name="adds-too"):
        def g(self):
            return "other g"

    class Wraps(VLLMPatch[Target], name="wraps"):
        @wrap
        def g(self, call):
            return call() + "!"

    engine.apply([Adds, Wraps])
    assert Target().g() == "g!"
    with pytest.raises(ConflictError, match=r"it replaces 'g', which patch 'adds' .* adds already"):
        engine.apply([AddsToo])
    with pytest.raises(ConflictError, match=r"it added 'g', which patch 'wraps' wraps. Next: revert 'wraps' first"):
        engine.revert(Adds)
    assert Target().g() == "g!"
    engine.revert(Wraps)
    engine.revert(Adds)
    assert not hasattr(Target, "g")


def test_a_subclass_after_its_base_is_no_conflict(engine):
    class Sub(Target): ...

    class OnSub(VLLMPatch[Sub]):
        @replace
        def f(self):
            return "sub"

    engine.apply([Instead, OnSub])
    assert (Target().f(), Sub().f()) == ("instead", "sub")
    engine.revert(OnSub)
    assert Sub().f() == "instead"


def test_strangers_are_noticed(engine):
    """Somebody else's setattr is named at verify, apply and revert; nothing of it is overwritten."""
    before = vars(Target)["f"]

    def foreign(self):
        return "foreign"

    foreign.__module__, foreign.__qualname__ = "other_package.tracing", "traced.f"
    engine.apply([A])
    assert engine.verify() == []
    ours = vars(Target)["f"]
    Target.f = foreign
    found = [str(error) for error in engine.verify()]
    assert len(found) == 1
    assert f"Target.f was set to other_package.tracing.traced.f ({__file__}:" in found[0]
    assert "by other code, over what patch 'A' put there" in found[0]
    for act in (lambda: engine.apply([B]), lambda: engine.revert(A)):
        with pytest.raises(ConflictError, match=r"other_package\.tracing\.traced\.f.*Next: leave out the other"):
            act()
    assert Target.f is foreign
    del Target.f
    with pytest.raises(ConflictError, match=r"was deleted by other code"):
        engine.revert(A)
    Target.f = ours
    engine.revert(A)
    assert vars(Target)["f"] is before


def test_two_engines_and_one_patch(engine):
    """The second engine would make the layers call each other in a circle; it is refused."""
    engine.apply([A])
    with pytest.raises(ConflictError, match=r"another engine has applied a patch of this name.*one engine only"):
        Engine().apply([A])
    assert Target().f() == "A(upstream)"


def test_wraps_count_every_call(engine):
    engine.apply([A, B])
    for _ in range(3):
        Target().f()
    assert [state.hits for state in engine.report()] == [3, 3]


def test_replacements_count_once_and_step_aside(engine):
    """After its first call a replacement is the plain function, beneath wraps too; the wraps go on counting."""
    engine.apply([Instead])
    probe = vars(Target)["f"]
    assert Target().f() == "instead"
    plain = vars(Target)["f"]
    assert plain is not probe
    assert plain.__code__ is Instead.declaration.hooks[0].value.__code__
    assert not plain.__closure__
    assert probe(Target()) == "instead"
    assert [state.hits for state in engine.report()] == [1]
    engine.apply([A])
    engine.recount()
    for _ in range(3):
        assert Target().f() == "A(instead)"
    assert [state.hits for state in engine.report()] == [2, 3]
    assert engine.verify() == []


def test_a_probe_called_after_its_patch_was_reverted(engine):
    """A probe that somebody kept neither counts nor puts anything back on the target."""
    before = vars(Target)["f"]
    engine.apply([Instead])
    kept = Target().f
    engine.revert(Instead)
    assert kept() == "instead"
    assert vars(Target)["f"] is before


def test_a_probe_leaves_a_stranger_alone(engine):
    engine.apply([Instead])
    ours = Target.f
    Target.f = stranger = lambda self: ours(self)
    assert Target().f() == "instead"
    assert vars(Target)["f"] is stranger
    Target.f = ours


def test_many_threads_prove_a_replacement_together(engine):
    """Threads that make the first call at once all get their answer, and the plain function ends up in place."""
    engine.apply([Instead, B])
    start = threading.Barrier(8)
    answers = []

    def call():
        start.wait()
        answers.extend(Target().f() for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {"B(instead)"}
    assert len(answers) == 400
    assert engine.report()[0].hits >= 1
    engine.revert(B)
    assert vars(Target)["f"].__code__ is Instead.declaration.hooks[0].value.__code__


def test_cells_may_be_exchanged(engine):
    """The memory of the counter is looked up at each hit."""
    counter = LocalHitCounter()
    own = Engine(counter)
    own.apply([B])
    Target().f()
    old, counter.cells = counter.cells, [0]
    Target().f()
    Target().f()
    assert (list(old), list(counter.cells)) == ([1], [2])
    own.revert(B)


def test_the_same_key_gets_the_same_cell():
    counter = LocalHitCounter()
    assert [counter.allot("a"), counter.allot("b"), counter.allot("a")] == [0, 1, 0]
    assert list(counter.cells) == [0, 0]


def test_an_inherited_name_is_named_as_such(engine):
    """The patch shadows it on the target alone, which its author should know."""

    class Base:
        def f(self):
            return 1

    class Derived(Base): ...

    class Own(VLLMPatch[Derived], name="own"):
        @wrap
        def f(self, call):
            return call() + 1

    engine.apply([Own])
    assert (Base().f(), Derived().f()) == (1, 2)
    (state,) = engine.report()
    assert state.state == "applied"
    assert state.reason.startswith("it is inherited from tests.patching.test_patched_attribute:")
    assert state.reason.endswith("Base; other subclasses of that are not changed")
