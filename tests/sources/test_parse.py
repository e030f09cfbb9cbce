"""Files read whatever is in them: encodings, pipes, devices, code that is nested too deeply."""

import os
import warnings
from pathlib import Path

import pytest

from vllm_graft.sources import Tree, find
from vllm_graft.sources import origins as parsing
from vllm_graft.sources.origins import decode, parse, read_text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("# Grüße\r\nx = 1\ry = 2\n".encode(), "# Grüße\nx = 1\ny = 2\n"),
        ("\ufeffx = 1".encode(), "x = 1"),
        ("# coding: latin-1\nx = 'ß'".encode("latin-1"), "# coding: latin-1\nx = 'ß'"),
        ("x = 'ß'\r\n".encode("latin-1"), "x = '\ufffd'\n"),
        (b"# coding: no-such-codec\r\n", "# coding: no-such-codec\n"),
    ],
)
def test_text_is_decoded_as_it_declares(data, text):
    """Without a byte order mark, with one kind of line end, and with a mark for each bad byte."""
    assert decode(data) == text


def test_only_regular_files_of_a_source_s_size_are_read(tmp_path, monkeypatch):
    """A pipe and /dev/zero have no end."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    (tmp_path / "large.py").write_text("x = 1\n")
    assert read_text(tmp_path / "large.py") == "x = 1\n"
    monkeypatch.setattr(parsing, "MAX_FILE_BYTES", 3)
    for path in (tmp_path / "large.py", tmp_path / "pipe.py", tmp_path / "zero.py", tmp_path, Path("/dev/zero")):
        assert read_text(path) is None


def test_code_that_is_nested_too_deeply_cannot_be_parsed(tmp_path):
    """A SyntaxError, and no end of the process; the module counts as unreadable."""
    deep = f"x = {'-' * 100_000}1"
    with pytest.raises(SyntaxError):
        parse(deep)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "deep.py").write_text(f"def f(): ...\n{deep}")
    assert find(Tree(tmp_path), "vllm.deep", "f") is None


def test_parsing_warns_of_nothing():
    """Invalid escape sequences are their author's affair."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parse("x = '\\d'\n")
    assert caught == []
