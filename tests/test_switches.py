"""The variables that turn vllm-graft off."""

import pytest

from vllm_graft.switches import allowed_plugins, disabled


@pytest.mark.parametrize(("value", "off"), [("1", True), (" yes ", True), ("0", False), ("No", False), ("", False)])
def test_the_package_is_off_where_the_variable_says_so(value: str, off: bool):
    assert disabled({"GRAFT_DISABLE": value}) is off
    assert not disabled({})


def test_plugins_are_listed_as_vllm_reads_them():
    """With blanks, and an empty value as one empty name."""
    assert allowed_plugins({"VLLM_PLUGINS": "graft, other"}) == ("graft", " other")
    assert allowed_plugins({"VLLM_PLUGINS": ""}) == ("",)
    assert allowed_plugins({}) is None
