"""Copies of a name that are found by comparing, and changed wherever they are."""

import pytest

HEAD = "import sys\nfrom vllm.v1.request import Request as Original\nclass Mine(Original): ...\n"


@pytest.mark.parametrize(
    "body",
    [
        "if hasattr(module, 'Request') and module.Request == Original:\n        module.Request = Mine",
        "if module.Request is Original:\n        module.Request = Mine",
        "if getattr(module, 'Request', None) is Original:\n        setattr(module, 'Request', Mine)",
    ],
)
def test_a_sweep_over_modules(puts, body):
    """What is put in the place of a copy is put in the place of the name."""
    text = f"{HEAD}for name, module in sys.modules.items():\n    {body}"
    assert puts(text) == [("replace", "vllm.v1.request:Request")]


@pytest.mark.parametrize(
    "body",
    [
        "if module.Request is Mine:\n        module.Request = Mine",
        "if module.Request is not Original:\n        module.Request = Mine",
        "if module.Request is Original:\n        module.Other = Mine",
        "if module.Request is Original:\n        ...\n    module.Request = Mine",
    ],
)
def test_what_is_no_copy(puts, body):
    """Another thing, another attribute, or no longer behind the comparison."""
    assert puts(f"{HEAD}for name, module in sys.modules.items():\n    {body}") == []
