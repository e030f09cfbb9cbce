"""The folder for the sockets of a vLLM that we start."""

import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from vllm_graft import sockets


@pytest.fixture
def near(monkeypatch):
    """A folder for temporary files that is near the root."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_it_goes_with_what_is_in_it(near):
    with sockets.temporary({}) as variables:
        folder = Path(variables[sockets.VARIABLE])
        assert folder.parent == near
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(folder / str(uuid.uuid4())))
    assert list(near.iterdir()) == []


def test_a_folder_that_is_named_stays(near):
    with sockets.temporary({sockets.VARIABLE: "/somewhere"}) as variables:
        assert variables == {}
    assert list(near.iterdir()) == []
    sockets.remove(None)


def test_a_name_that_leaves_no_room_for_a_socket_is_not_used(near, monkeypatch):
    with sockets.temporary({}) as variables:
        added = len(variables[sockets.VARIABLE]) - len(str(near))
    name = len(str(uuid.uuid4()))
    for length, used in ((107 - name - 1 - added, True), (107 - name - added, False)):
        far = near / ("x" * (length - len(str(near)) - 1))
        far.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(far))
        with sockets.temporary({}) as variables:
            assert bool(variables) is used
            if used:
                with socket.socket(socket.AF_UNIX) as made:
                    made.bind(str(Path(variables[sockets.VARIABLE]) / str(uuid.uuid4())))
        assert list(far.iterdir()) == []
