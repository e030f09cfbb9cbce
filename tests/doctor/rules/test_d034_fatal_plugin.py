"""D034: a general plugin that ends every process."""

import pytest


@pytest.fixture
def found(site):
    """Lay a general plugin out and say what the rule finds."""

    def findings(text):
        site.package("mine", {"vllm.general_plugins": {"mine": "graft_doctor_fatal:register"}},
                     {"graft_doctor_fatal": text})  # fmt: skip
        return site.found("D034")

    return findings


@pytest.mark.parametrize(
    "text",
    [
        "import sys\ndef register():\n    sys.exit(1)\n",
        "import os\ndef register():\n    print(1)\n    os._exit(3)\n",
        "def register():\n    raise RuntimeError('no licence')\n",
        "def register():\n    raise SystemExit\n",
        "import sys\nsys.exit('unsupported')\ndef register(): ...\n",
        "import sys\ndef helper():\n    sys.exit(1)\ndef register():\n    helper()\n",
        "import sys\ndef one():\n    print()\n    two()\ndef two():\n    sys.exit(1)\ndef register():\n    x = one()\n",
        "def helper():\n    raise RuntimeError('no licence')\ndef register():\n    helper()\n",
        "import sys\ndef helper():\n    sys.exit(1)\nhelper()\ndef register(): ...\n",
    ],
)
def test_what_always_ends_the_process(found, site, text):
    (finding,) = found(text)
    assert (finding.level, finding.subject) == ("error", "plugin 'mine' of mine")
    assert "every process stops" in finding.what
    site.environ["VLLM_PLUGINS"] = "other"
    assert [each.level for each in found(text)] == ["warning"]


@pytest.mark.parametrize(
    "text",
    [
        "def register(): ...\n",
        "import sys\ndef register():\n    if sys.platform == 'win32':\n        sys.exit(1)\n",
        "import sys\ndef register():\n    if sys.argv:\n        return\n    sys.exit(1)\n",
        "import sys\ndef register():\n    try:\n        sys.exit(1)\n    except SystemExit:\n        pass\n",
        "import sys\ndef helper():\n    sys.exit(1)\ndef register(): ...\n",
        "import sys\ndef helper():\n    if sys.argv: return\n    sys.exit(1)\ndef register():\n    helper()\n",
        "import sys\n@lazy\ndef helper():\n    sys.exit(1)\ndef register():\n    helper()\n",
        "import sys\ndef helper():\n    sys.exit(1)\n    yield\ndef register():\n    helper()\n",
        "import sys\ndef helper():\n    sys.exit(1)\ndef register():\n    if sys.argv: helper()\n",
        "def helper():\n    helper()\ndef register():\n    helper()\n",
        # vLLM catches what the import raises.
        "def helper():\n    raise RuntimeError\nhelper()\ndef register(): ...\n",
        "def register():\n    return 1\n    raise RuntimeError\n",
        "import sys\nif __name__ == '__main__':\n    sys.exit(1)\ndef register(): ...\n",
        # An exception of the import is caught and logged by vLLM: D010 with --imports.
        "raise ImportError('libfoo')\ndef register(): ...\n",
    ],
)
def test_conditions_are_let_be(found, text):
    assert found(text) == []
