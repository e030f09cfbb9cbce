"""The releases a patch is written for, against the vLLM that is installed."""

import pytest

from vllm_graft.errors import VersionError
from vllm_graft.patching import VLLMPatch, min_vllm_version


class Target:
    def f(self):
        return 1


def ranged(text):
    class Guard(VLLMPatch[Target], name="guard", vllm=text):
        def f(self):
            return 2

    return Guard


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.0+cpu", "0.32.1.post2", "0.30.0rc1", "0.32.0rc3+cu129"])
def test_inside(engine, installed, version):
    """Only the release number counts: local parts, release candidates and post releases are taken as their release."""
    installed(version)
    engine.apply([ranged(">=0.26,<0.33")])
    assert Target().f() == 2


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "0.33.0rc1", "1.0"])
def test_outside(engine, installed, version):
    """The error names the patch, what was found, the range and the next step; the target is untouched."""
    installed(version)
    with pytest.raises(VersionError) as caught:
        engine.apply([ranged(">=0.26,<0.33")])
    text = str(caught.value)
    assert "patch 'guard'" in text
    assert f"written for vLLM >=0.26,<0.33, but {version} is installed. Next: install vLLM >=0.26,<0.33" in text
    assert Target().f() == 1
    assert [(state.state, state.reason) for state in engine.report()] == [("refused", text)]


@pytest.mark.parametrize("version", ["0.1.dev1+gabcdef", "0.32.1.dev5+g123", "unreadable"])
def test_development_builds_lie_in_no_range_by_number(engine, installed, version):
    """Their number says nothing of their code, and nothing was reviewed; a patch without a range is still applied."""
    installed(version)
    with pytest.raises(
        VersionError, match=r"development build, whose code was not reviewed.*Next: install a release, or"
    ):
        engine.apply([ranged(">=0.0")])
    engine.apply([ranged("")])
    assert Target().f() == 2


def test_no_vllm_at_all(engine, installed):
    installed(None)
    with pytest.raises(VersionError, match=r"written for vLLM >=0.26, but none is installed. Next: install vLLM"):
        engine.apply([ranged(">=0.26")])


def test_the_decorator_narrows(engine, installed):
    """``@min_vllm_version`` is a lower bound in addition to the range."""
    installed("0.27.0")
    with pytest.raises(VersionError, match=r"<0.33,>=0.28"):
        engine.apply([min_vllm_version("0.28")(ranged("<0.33"))])
    engine.apply([min_vllm_version("0.27")(ranged("<0.33"))])
    assert Target().f() == 2
