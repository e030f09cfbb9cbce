"""What others wrote is printed without steering the terminal or forging a line."""

import logging

import pytest

from vllm_graft.boot.process import LOG
from vllm_graft.cli.printing import paint, show_findings, table
from vllm_graft.errors import ConfigError
from vllm_graft.findings import Finding
from vllm_graft.text import encodable, printable, printable_lines

HOSTILE = "before\x1b[2J\x1b[31m\r\nINFO fine\x9b0m\u202e after\ud800"
SAFE = r"before\x1b[2J\x1b[31m\r\nINFO fine\x9b0m\u202e after\ud800"


def test_each_unsafe_character_becomes_its_escape():
    """And what people write in any language is left alone."""
    assert printable(HOSTILE) == SAFE
    for text in ("plain", "größe 模型 модель 🙂", "a\\nb"):
        assert printable(text) == text


def test_halves_of_a_pair_are_all_that_an_encoder_refuses():
    """Line breaks and escapes stay: what is sent as data is not printed yet."""
    assert encodable(HOSTILE) == HOSTILE.replace("\ud800", r"\ud800")
    assert encodable("größe 🙂\n") == "größe 🙂\n"


def test_line_breaks_and_tabs_may_be_kept():
    """As in a table's cell, or a diff."""
    assert printable_lines("a\n\tb\x1b[0m\x00") == "a\n\tb\\x1b[0m\\x00"


def test_an_error_is_one_line():
    """Whichever of its parts holds the characters."""
    assert str(ConfigError(HOSTILE, where=HOSTILE, fix=HOSTILE)) == f"{SAFE}: {SAFE}. Next: {SAFE}"


def test_a_finding_is_one_line():
    """Its data stay as they are; JSON escapes them itself."""
    found = Finding("P003", "error", HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    assert found.explain() == f"P003 error: {SAFE}: {SAFE} [{SAFE}]. Next: {SAFE}"
    assert show_findings([found]) == found.explain()
    assert found.as_dict()["what"] == HOSTILE


def test_a_table_shows_them():
    """In cells, whose own line breaks are kept."""
    shown = table(("A", "B"), [("one\ntwo", "x\x1b[2J"), ("\x1b]0;title\x07", "y")])
    assert shown.splitlines()[1:] == ["one               x\\x1b[2J", "two", "\\x1b]0;title\\x07  y"]


def test_on_a_terminal_only_our_colours_remain(monkeypatch: pytest.MonkeyPatch):
    """``paint`` colours what it has made safe, and a table keeps nothing but its colours."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    painted = paint("bad\x1b[2J", "red")
    assert painted == "\x1b[31mbad\\x1b[2J\x1b[0m"
    assert table(("A",), [(f"{painted}\x1b[5m",)], width=99).endswith(f"{painted}\\x1b[5m")


def test_log_lines_are_single_lines(caplog: pytest.LogCaptureFixture):
    """Every message of the server's log that is ours, however it was put together."""
    with caplog.at_level(logging.INFO, logger=LOG.name):
        LOG.warning("vllm-graft: %s: %d", HOSTILE, 3)
        LOG.info("100% plain")
    assert caplog.messages == [f"vllm-graft: {SAFE}: 3", "100% plain"]
