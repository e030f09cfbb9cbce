"""Patches beside one another: declared conflicts, and which layer lies over which."""

import pytest

from vllm_graft.errors import ConflictError
from vllm_graft.patching import VLLMPatch, wrap


class Target:
    def f(self):
        return "."


def layer(name, **keywords):
    class Layer(VLLMPatch[Target], name=name, **keywords):
        @wrap
        def f(self, call):
            return f"{name}({call()})"

    return Layer


@pytest.mark.parametrize("pattern", ["b", "b*", "tests:b", "tests:?"])
def test_a_declared_conflict_names_both(engine, pattern):
    """By name, by glob, by package; whichever of the two comes first."""
    a, b = layer("a", conflicts=[pattern]), layer("b")
    for order in ([a, b], [b, a]):
        with pytest.raises(ConflictError, match=r"patch 'a' \(.*\) declares a conflict with patch 'b' \(") as caught:
            engine.apply(order)
        assert "leave out 'a' or 'b'" in caught.value.fix or "leave out 'b' or 'a'" in caught.value.fix
        assert Target().f() == "."
    engine.apply([b])
    with pytest.raises(ConflictError):
        engine.apply([a])


def test_a_conflict_with_a_package_that_knows_nothing_of_us(engine, make):
    """It is enough that the process has imported it."""
    module = make("")
    with pytest.raises(ConflictError, match=rf"a conflict with the package '{module.__name__}', which this process"):
        engine.apply([layer("a", conflicts=[f"{module.__name__}:*"])])
    engine.apply([layer("a", conflicts=["not_imported_anywhere:*"])])


def test_order_of_application(engine):
    """Without a word, the later one lies over the earlier one."""
    engine.apply([layer("a"), layer("b")])
    assert Target().f() == "b(a(.))"


@pytest.mark.parametrize("together", [True, False])
def test_after(engine, together):
    """A patch lies over those its ``after`` names, also when they come later."""
    over, under = layer("over", after=["under"]), layer("under")
    if together:
        engine.apply([over, under])
    else:
        engine.apply([over])
        engine.apply([under])
    assert Target().f() == "over(under(.))"
    engine.revert(under)
    assert Target().f() == "over(.)"


def test_a_circle_is_refused(engine):
    """Nothing is changed."""
    with pytest.raises(ConflictError, match=r"patches 'a' and 'b' each want to be applied over the other"):
        engine.apply([layer("a", after=["b"]), layer("b", after=["a"])])
    assert Target().f() == "."
