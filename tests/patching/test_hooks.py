"""Several bodies of one method, each for other releases."""

import pytest

from vllm_graft.errors import DeclarationError, VersionError
from vllm_graft.patching import VLLMPatch, add, replace, wrap


class Target:
    def f(self):
        return "f"

    @property
    def size(self):
        return 1

    @classmethod
    def make(cls):
        return "made"


class Both(VLLMPatch[Target], name="both", vllm=">=0.26,<0.33"):
    @replace(vllm="<0.31")
    def f(self):
        return "old"

    @wrap(vllm=">=0.31")
    def f(self, call):
        return "new " + call()

    @property
    @replace(vllm="<0.31")
    def size(self):
        return 2

    @replace(vllm=">=0.31")
    @property
    def size(self):
        return 3

    @classmethod
    @wrap(vllm="<0.31")
    def make(cls, call):
        return "old " + call()

    @wrap(vllm=">=0.31")
    @classmethod
    def make(cls, call):
        return "new " + call()

    @add(vllm="<0.31")
    def extra(self):
        return "old"

    @add(vllm=">=0.31")
    def extra(self):
        return "new"


@pytest.mark.parametrize(
    ("version", "seen"),
    [("0.30.0", ("old", 2, "old made", "old")), ("0.31.0", ("new f", 3, "new made", "new"))],
)
def test_the_body_that_fits_is_applied(engine, installed, version, seen):
    """And its kind is the one reported."""
    installed(version)
    states = engine.apply([Both])
    assert (Target().f(), Target().size, Target.make(), Target().extra()) == seen
    assert [state.attribute for state in states] == ["f", "size", "make", "extra"]
    assert states[0].kind == ("replace" if version == "0.30.0" else "wrap")
    engine.revert(Both)
    assert (Target().f(), Target().size, Target.make()) == ("f", 1, "made")


def test_exactly_one_must_fit(engine, installed):
    """None, or two, is refused with the ranges."""

    class Gap(VLLMPatch[Target], name="gap"):
        @replace(vllm="<0.30")
        def f(self):
            return 1

        @replace(vllm=">=0.31")
        def f(self):
            return 2

    class Overlap(VLLMPatch[Target], name="overlap"):
        @replace(vllm="<0.31")
        def f(self):
            return 1

        @replace(vllm=">=0.30")
        def f(self):
            return 2

    installed("0.30.0")
    with pytest.raises(VersionError, match=r"no body of 'f' \(<0.30 and >=0.31\) is for vLLM 0.30.0, but exactly one"):
        engine.apply([Gap])
    with pytest.raises(VersionError, match=r"2 bodies of 'f' \(<0.31 and >=0.30\) are for vLLM 0.30.0, but exactly"):
        engine.apply([Overlap])
    assert Target().f() == "f"


def test_a_body_without_a_range_beside_one_with(installed):
    """Python would keep the last one without a word."""
    with pytest.raises(DeclarationError, match=r"several bodies of 'f', but one of them has no range"):

        class Mixed(VLLMPatch[Target]):
            @replace(vllm="<0.31")
            def f(self): ...

            @replace
            def f(self): ...


def test_a_bad_range_is_refused_at_once():
    """As with the range of the whole patch."""
    with pytest.raises(DeclarationError, match=r"'0.31\+' is not a part of a version range"):

        class Bad(VLLMPatch[Target]):
            @replace(vllm="0.31+")
            def f(self): ...
