"""Every state has a word, a colour that can be read, and a meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from vllm_graft.audit.model import PackageUses, VerdictState
from vllm_graft.audit.render.html import changed_lines, parts
from vllm_graft.audit.render.presentation import (
    COLOURS,
    WORDS,
    Tone,
    attention_count,
    cells,
    count,
    findings,
    groups,
    needs_attention,
    one_line,
    short_name,
    state_counts,
    summary,
    weight,
)
from vllm_graft.findings import Finding


def test_every_state_has_a_word_of_its_own():
    assert set(WORDS) == set(get_args(VerdictState))
    assert len({word.short for word in WORDS.values()}) == len(WORDS)


def test_only_what_was_not_judged_is_blank():
    assert [state for state, word in WORDS.items() if not word.short] == [""]


def test_what_raises_is_worse_than_what_changed_and_that_is_worse_than_nothing():
    assert weight("gone") > weight("moved") > weight("uncalled") > weight("body") > weight("same") > weight("")


def test_one_is_not_a_plural():
    assert [count(number, "use") for number in (0, 1, 1200)] == ["0 uses", "1 use", "1,200 uses"]


def _light(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, bright = sorted([_light(one), _light(other)])
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("tone", get_args(Tone))
@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_a_word_can_be_read_on_its_colour(screen, tone):
    """At least the 4.5 to 1 that the web's accessibility guidelines (WCAG 2, level AA) ask for."""
    assert _contrast(COLOURS[tone][screen], COLOURS[f"{tone}-bg"][screen]) >= 4.5


@pytest.mark.parametrize("ink", ["ink", "soft", "link"])
@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_the_page(screen, ink):
    assert _contrast(COLOURS[ink][screen], COLOURS["paper"][screen]) >= 4.5


def test_rows_are_grouped_by_package_and_the_worst_is_first(report):
    found = groups(report)
    assert [group.title for group in found] == ["beta", "alpha 1.2"]
    assert [short_name(row.use) for row in found[0].changed] == ["v1.worker:Worker.stop", "v1.queue:make_queue"]
    assert [short_name(row.use) for row in found[1].changed] == [
        "v1.sched:Scheduler.__init__",
        "v1.sched:Scheduler.schedule",
    ]


def test_rows_that_ask_for_no_look_are_counted(report):
    assert [group.folded for group in groups(report)] == ["", "1 unchanged, 1 not judged"]


def test_a_name_in_no_release_is_not_counted_as_unchanged(report, make):
    row = make("alpha", "vllm.v1.late:Never", "absent", "absent", fallback=True)
    found = groups(replace(report, rows=(*report.rows, row)))
    assert found[1].folded == "1 unchanged, 1 absent, 1 not judged"


def test_a_release_without_a_cell_is_not_judged(report):
    assert [cell.verdict.state for cell in cells(report, report.rows[-1])] == ["", "moved"]


@pytest.mark.parametrize(("more", "asked"), [({}, True), ({"fallback": True}, False), ({"way": "add"}, False)])
def test_a_name_in_no_release_is_well_for_who_adds_or_guards_it(make, more, asked):
    assert needs_attention(make("alpha", "vllm.a:b", "absent", **more).use, "absent") is asked


def test_the_summary_counts_uses_and_names_releases(report):
    assert "".join(summary(report)) == (
        "4 of 6 uses of vLLM need a look, in 2 packages checked against vLLM 0.31.0 to 0.32.0, "
        "each compared with the release before."
    )
    based = replace(report, base="0.26.0", releases=("0.32.0",))
    assert "".join(summary(based)).endswith("checked against vLLM 0.32.0, compared with 0.26.0.")


def test_the_summary_of_nothing_says_so(empty):
    assert "".join(summary(empty)) == "No use of vLLM was found in 1 package."


def test_a_report_may_have_no_columns(report):
    assert "checked against no release of vLLM" in summary(replace(report, releases=()))[1]


def test_counts_by_state_and_by_release(report):
    assert state_counts(report) == {"same": 3, "body": 2, "extended": 1, "": 3, "broken": 1, "gone": 1, "moved": 1}
    assert [attention_count(report, release) for release in report.releases] == [2, 4]


def test_files_that_could_not_be_read_are_findings_and_each_is_named_once(report):
    unread = Finding("P209", "error", "alpha", "cannot be read")
    more = replace(report, packages=(PackageUses("alpha", (), unread=(unread,)),))
    assert [each.code for each in findings(more)] == ["P201", "P209", "P207"]
    assert findings(replace(more, findings=(unread,))) == [unread]


def test_control_characters_do_not_reach_a_terminal():
    assert one_line("a\x1b[31m\nb\u202ec  d") == "a [31m b c d"


def test_a_diff_is_taken_apart_by_line():
    diff = "--- a\n+++ b\n@@ -1,2 +1,2 @@\n same\n--- x\n++++ y\n+z\n"
    assert [(part, len(lines)) for part, lines in parts(diff)] == [
        ("head", 2),
        ("hunk", 1),
        ("context", 1),
        ("removed", 1),
        ("added", 2),
    ]
    assert changed_lines(diff) == (2, 1)
    assert changed_lines("+a\n-b\n") == (1, 1)
    assert list(parts("")) == []
