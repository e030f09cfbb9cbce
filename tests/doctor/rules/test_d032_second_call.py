"""D032: a plugin that refuses a second call."""

import pytest

REFUSES = """
_done = False
def register():
    global _done
    if _done:
        raise RuntimeError("twice")
    _done = True
"""


@pytest.fixture
def found(site):
    """Lay a plugin out and say what the rule finds."""

    def findings(text, group="vllm.general_plugins"):
        site.package("mine", {group: {"mine": "graft_doctor_twice:register"}}, {"graft_doctor_twice": text})
        return site.found("D032")

    return findings


@pytest.mark.parametrize(
    "text", [REFUSES, REFUSES.replace('if _done:\n        raise RuntimeError("twice")', "assert not _done")]
)
def test_a_flag_that_raises(found, text):
    (finding,) = found(text)
    assert (finding.level, finding.subject) == ("warning", "plugin 'mine' of mine")
    assert "raises when it is called a second time" in finding.what
    (finding,) = found(text, "vllm.platform_plugins")
    assert finding.level == "error"


@pytest.mark.parametrize(
    "text",
    [
        REFUSES.replace('raise RuntimeError("twice")', "return"),
        REFUSES.replace("    _done = True\n", "    _done = False\n"),
        REFUSES.replace("    global _done\n", ""),
        "def register(): ...\n",
    ],
)
def test_others_are_let_be(found, text):
    assert found(text) == []
