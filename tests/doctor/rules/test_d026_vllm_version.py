"""D026: no vLLM, one outside the tested range, or a development build."""

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_graft.doctor.rules import d026_vllm_version as rule


@pytest.fixture
def found(site):
    """What the rule says of a version."""
    return lambda version, root=Path("/vllm"): list(rule.check(replace(site.environment(), vllm=version, root=root)))


def test_no_vllm_is_an_error(found):
    (finding,) = found(None, None)
    assert (finding.level, finding.subject) == ("error", "vLLM")


def test_a_vllm_that_does_not_say_its_version_is_a_warning(found):
    (finding,) = found(None)
    assert finding.level == "warning"
    assert "does not state its version" in finding.what


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0"])
def test_a_version_outside_the_range_is_a_warning_that_names_the_range(found, version):
    (finding,) = found(version)
    assert finding.level == "warning"
    assert f"{version} is outside the tested range" in finding.what


@pytest.mark.parametrize("version", ["0.32.1.dev12+gabcdef", "0.32.0rc1", "0.32.0+gabcdef"])
def test_a_development_build_is_good_to_know(found, version):
    (finding,) = found(version)
    assert finding.level == "info"
    assert "development build" in finding.what


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.0+cpu", "0.32.0.post1", "0.32.0+cu130"])
def test_a_tested_release_is_fine(found, version):
    assert found(version) == []
