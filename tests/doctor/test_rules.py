"""The rules as a set: each where its code says, and each in the page's table under its title."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_graft.doctor.imports import TITLES
from vllm_graft.doctor.rules import rules

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "how-to" / "doctor.md"
FINDINGS = FOLDER.parents[1] / "docs" / "reference" / "findings.md"


def test_a_rules_file_is_named_after_its_code():
    for rule in rules():
        assert rule.__name__.rpartition(".")[2].startswith(f"{rule.CODE.lower()}_")


def test_the_page_lists_every_rule_under_its_title():
    row = re.compile(r"^\| \[(D\d{3})\]\(\.\./reference/findings\.md#d\d{3}\)(?: \*)? \| (.+?) \|", re.MULTILINE)
    shown = {code: what.replace("`", "").lower() for code, what in row.findall(PAGE.read_text(encoding="utf-8"))}
    titles = {rule.CODE: rule.TITLE for rule in rules()} | TITLES
    assert shown == {code: title.lower() for code, title in titles.items()}


@pytest.mark.parametrize("code", sorted({rule.CODE for rule in rules()} | TITLES.keys()))
def test_the_page_of_findings_says_what_happens_with_a_quote_an_example_and_what_to_do(code):
    text = FINDINGS.read_text(encoding="utf-8").partition(f"\n## {code}\n")[2].partition("\n## ")[0]
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    title, *rest = paragraphs
    told = [part for part in rest if not part.startswith(("> ", "Example: ", "**What to do.** "))]
    assert title.strip().startswith("*")
    assert "From `vllm-graft doctor" in title.replace("\n", " ")
    assert any(part.startswith("> ") for part in rest)
    assert told, "what happens, and why nobody hears of it"
    assert sum(part.startswith("Example: ") for part in rest) == 1
    assert rest[-1].startswith("**What to do.** ")


@pytest.mark.parametrize("code", sorted({rule.CODE for rule in rules()} | TITLES.keys()))
def test_a_rule_is_provoked_in_a_test_and_held_against_the_real_vllm(code):
    real = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("test_real_*.py"))
    own = [file.name for file in (FOLDER / "rules").glob(f"test_{code.lower()}_*.py")]
    assert own or f'"{code}"' in (FOLDER / "test_imports.py").read_text(encoding="utf-8")
    assert f"def test_{code.lower()}_" in real
