"""The rules as a set: each where its code says, and each in the page's table under its title."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_graft.doctor.children import TITLES
from vllm_graft.doctor.examine import rules

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_a_rules_file_is_named_after_its_code():
    for rule in rules():
        assert rule.__name__.rpartition(".")[2].startswith(f"{rule.CODE.lower()}_")


def test_the_page_lists_every_rule_under_its_title():
    row = re.compile(r"^\| \[(D\d{3})\]\(findings.md#d\d{3}\)(?: \*)? \| (.+?) \|", re.MULTILINE)
    shown = {code: what.replace("`", "").lower() for code, what in row.findall(PAGE.read_text(encoding="utf-8"))}
    titles = {rule.CODE: rule.TITLE for rule in rules()} | TITLES
    assert shown == {code: title.lower() for code, title in titles.items()}
