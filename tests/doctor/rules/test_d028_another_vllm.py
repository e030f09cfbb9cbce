"""D028: a plugin whose package requires another vLLM."""

from dataclasses import replace

import pytest

from vllm_graft.doctor.rules import d028_another_vllm as rule


@pytest.fixture
def requiring(site):
    """requiring("vllm==0.23.0", "0.32.0") -> what the rule says with that requirement and that vLLM installed."""

    def said(requirement: str, vllm: str | None) -> list:
        site.package("plugin", {"vllm.general_plugins": {"plugin": "plugin_module:register"}})
        metadata = site.folder / "plugin-1.0.dist-info" / "METADATA"
        metadata.write_text(f"Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\nRequires-Dist: {requirement}\n")
        return list(rule.check(replace(site.environment(), vllm=vllm)))

    return said


def test_a_pin_on_another_release_is_a_warning_that_names_both(requiring):
    (finding,) = requiring("vllm==0.23.0", "0.32.0+cpu")
    assert (finding.level, finding.subject) == ("warning", "package plugin 1.0")
    assert finding.what.startswith("it requires vllm==0.23.0, but 0.32.0+cpu is installed")
    assert "vllm-graft audit plugin --against 0.32.0" in finding.fix


@pytest.mark.parametrize(
    ("requirement", "vllm"),
    [
        ("vllm>=0.26", "0.32.0"),
        ("vllm==0.32.0", "0.32.0+cpu"),
        ("vllm==0.32.0+cpu", "0.32.0+cpu"),
        ("vllm", "0.32.0"),
        ('vllm==0.23.0; extra == "test"', "0.32.0"),
        ("torch==1.0", "0.32.0"),
        ("vllm==0.23.0", "0.1.dev1+g123"),
        ("vllm==0.23.0", None),
    ],
)
def test_what_fits_or_cannot_be_judged_is_not_reported(requiring, requirement, vllm):
    assert requiring(requirement, vllm) == []
