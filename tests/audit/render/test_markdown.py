"""The comment on a pull request."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from vllm_graft.audit.render import markdown
from vllm_graft.audit.render.markdown import DIFF_LINES, LIMIT


def test_the_summary_is_the_first_line(report):
    assert markdown(report).startswith("**4 of 6 uses of vLLM need a look**, in 2 packages checked against")


def test_the_table_has_short_words_and_the_worst_first(report):
    rows = [line for line in markdown(report).split("\n") if line.startswith("| `")]
    assert rows == [
        "| `v1.worker:Worker.stop`<br><sub>override `beta/patches.py:7`</sub> | sig! | gone |",
        "| `v1.queue:make_queue`<br><sub>replace `beta/q.py:3`</sub> |  | moved |",
        "| `v1.sched:Scheduler.__init__`<br><sub>wrap `alpha/patches.py:7`</sub> | body | sig+ |",
        "| `v1.sched:Scheduler.schedule`<br><sub>wrap `alpha/patches.py:7`</sub> | · | body |",
    ]


def test_unchanged_rows_are_folded_into_a_count(report):
    folded = markdown(report).partition("<details><summary>1 unchanged, 1 not judged</summary>")[2]
    assert "- `config.vllm:VllmConfig.check` import\n- `v1.late:Later` wrap" in folded.partition("</details>")[0]


def test_findings_say_what_where_and_the_next_step_and_errors_come_first(report):
    found = [line for line in markdown(report).split("\n") if line.startswith("- **")]
    assert found == [
        "- **P201** error: `vllm.v1.worker:Worker.stop`: it is nowhere (`beta/patches.py:7`). "
        "Next: run `vllm-graft diff`",
        "- **P207** info: `vllm.v1.sched:Scheduler.schedule`: its code changed (`alpha/patches.py:7`). Next: read it",
    ]


def test_diffs_are_folded_in_a_fence(report):
    said = markdown(report)
    assert "<summary><code>v1.sched:Scheduler.schedule</code> body, 0.31.0 → 0.32.0</summary>\n\n```diff\n---" in said
    assert "+    return new(a & b)\n```\n\n</details>" in said


def test_a_fence_is_longer_than_any_backticks_within(hostile):
    said = markdown(hostile)
    assert "\n``````diff\n" in said
    assert said.count("\n``````\n") == 1


def test_a_long_diff_is_cut_with_a_note(make, report):
    row = make("alpha", "vllm.a:b", "same", "body", diff="@@ -1 +1 @@\n" + "+x\n" * 250)
    said = markdown(type(report)((), "", report.releases, (row,), ()))
    assert said.count("\n+x") == DIFF_LINES - 1
    assert "51 more lines of this diff left out." in said


def test_names_are_no_markup(hostile):
    """Outside of code there is no element, no user and no issue."""
    shown = re.sub(r"(?s)^(`{3,})diff\n.*?^\1$", "", markdown(hostile), flags=re.MULTILINE)
    titles = "".join(re.findall("<summary>(.*)</summary>", shown))
    rest = re.sub(r"<summary>.*</summary>|\\[`|]", "", shown)
    rest = re.sub(r"(?s)(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", rest)
    for bare in (re.sub("<code>.*?</code>", "", titles), rest):
        assert "@<!-- -->octocat #<!-- -->12" in bare
        assert not re.search("<script|@octocat|#12", bare)


def test_a_bar_in_a_name_does_not_end_its_cell(hostile):
    (row,) = [line for line in markdown(hostile).split("\n") if line.startswith("| `")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 4


@pytest.mark.parametrize("limit", [LIMIT, 8_000, 1_000])
def test_what_does_not_fit_a_comment_is_left_out_and_counted(big, limit):
    said = markdown(big, limit)
    assert len(said) <= limit
    left = re.search(r"_Left out, so that this fits in a comment: (.+)\. The page of the audit has all\._\n$", said)
    assert left is not None
    numbers = {thing.rstrip("s"): int(number) for number, thing in re.findall(r"(\d+) (\w+)", left[1])}
    assert numbers["diff"] + said.count("```diff") == 400
    assert numbers.get("row", 0) + said.count("\n| `") == 400
    assert numbers.get("finding", 0) + said.count("\n- **P205") == 400


def test_what_fits_has_no_note(report):
    assert "Left out" not in markdown(report)


def test_every_details_element_is_closed(report, big):
    for each in (report, big):
        assert markdown(each).count("<details>") == markdown(each).count("</details>")


def test_an_empty_report_is_one_line(empty, report):
    assert markdown(empty) == "**No use of vLLM was found** in 1 package.\n"
    assert "| `" in markdown(replace(report, releases=("0.31.0",)))
