"""The page."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from vllm_graft.audit.model import Report
from vllm_graft.audit.render import html

VOID = {"meta", "br", "wbr"}


class Page(HTMLParser):
    """Reads a page: checks that every element is closed where it should be, and gathers what a test asks for."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.mark.parametrize("name", ["report", "empty", "hostile"])
def test_the_page_is_well_formed_and_stands_alone(name, request):
    text = html(request.getfixturevalue(name))
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "svg"}
    assert not re.search(r"https?:|url\(|@import", text)
    assert not [attr for _, attrs in page.tags for attr in attrs if attr.startswith("on") or attr == "src"]
    assert "<script" not in text


def test_every_link_leads_to_an_anchor_of_the_page_and_anchors_are_unique(report):
    page = Page(html(report))
    anchors = page.values("id")
    assert len(anchors) == len(set(anchors))
    links = page.values("href")
    assert links
    assert {link.removeprefix("#") for link in links} <= set(anchors)


def test_a_changed_cell_leads_into_what_opens_below_its_row(report):
    """The anchor is inside both details elements: a browser opens those around a target, not the target itself."""
    text = html(report)
    schedule = text[text.index('<tr id="r4">') : text.index('<tr id="r5">')]
    assert '<a class="body" href="#r4-2">body</a>' in schedule
    assert "<summary>wrap in alpha/patches.py:7, fair</summary>" in schedule
    assert re.search(
        r"<details>.*<details><summary>.*0\.31\.0 → 0\.32\.0, \+1 −1 lines</summary><div id=\"r4-2\">", schedule
    )
    assert "why tenants starve; remove when vllm&gt;=0.34" in schedule
    assert "<ins>+    return new(a &amp; b)\n</ins>" in schedule
    assert "<del>-    return old(a &lt; b)\n</del>" in schedule


def test_a_verdict_without_a_diff_says_what_it_says_and_where_the_name_is_now(report):
    assert (
        "moved 0.31.0 → 0.32.0: its module is a package now, now vllm.v1.queues:make_queue" in Page(html(report)).text
    )


def test_head_and_summary_name_packages_versions_and_time(report):
    text = Page(html(report, title="Nightly <audit>", when="22 September")).text
    assert "Nightly <audit>" in text
    assert "alpha 1.2, made for vLLM 0.30.0, 3 files read" in text
    assert "22 September" in text
    assert "4 of 6 uses of vLLM need a look, in 2 packages" in text


def test_rows_are_in_groups_with_the_worst_first(report):
    text = Page(html(report)).text
    places = [text.index(each) for each in ("v1.worker:Worker.stop", "v1.sched:Scheduler.__init__", "v1.late:Later")]
    assert places == sorted(places)
    page = html(report)
    assert page.index('<h3 class="p">beta</h3>') < page.index('<h3 class="p">alpha 1.2</h3>')


def test_every_cell_has_its_word_and_not_only_its_colour(report):
    rows = re.findall(r'<tr id="r\d+">.*?</tr>', html(report))
    words = [re.sub("<[^>]+>", "", cell) for row in rows for cell in re.findall("<td.*?</td>", row)]
    assert words == ["sig!", "gone", "", "moved", "body", "sig+", "·", "body", "·", "·", "", ""]


def test_why_a_cell_is_blank_is_its_tooltip(hostile):
    assert any("alert('x')" in title for title in Page(html(hostile)).values("title"))


def test_findings_and_their_number_come_before_the_matrix(report):
    text = html(report)
    levels = ["error", "warning", "info"]
    numbers = [sum(finding.level == level for finding in report.findings) for level in levels]
    chips = re.findall(r'aria-label="findings">(.*?)</ul>', text)[0]
    assert [int(number) for number in re.findall(r">(\d+) (?:error|warning|note)s?<", chips)] == numbers
    assert text.index('aria-label="findings"') < text.index('id="f1"') < text.index('id="matrix"')


def test_what_has_not_changed_is_folded(report):
    """Rows that ask for no look are inside a closed details element; those that do are not."""
    text = html(report)
    folded = "".join(
        re.findall(r'<details class="rest"><summary>[^<]*(?:unchanged|judged).*?</table>', text, re.DOTALL)
    )
    assert "Scheduler.<wbr>__init__" not in folded
    assert "Later" in folded
    assert "<details open" not in text


def test_one_name_in_many_files_is_one_row(make, report):
    sample = make("alpha", "vllm.v1.sched:Scheduler", "gone", "gone")
    rows = tuple(replace(sample, use=replace(sample.use, file=f"alpha/m{number}.py")) for number in range(5))
    text = html(Report(report.packages, "", report.releases, rows, ()))
    assert len(re.findall(r'<tr id="r\d+">', text)) == 1
    assert "in 5 places, 5 files" in text
    assert all(f"alpha/m{number}.py" in text for number in range(5))


def test_a_name_with_other_verdicts_elsewhere_keeps_its_rows(make, report):
    rows = tuple(make("alpha", "vllm.v1.sched:Scheduler", "gone", state) for state in ("gone", "same"))
    assert len(re.findall(r'<tr id="r\d+">', html(Report(report.packages, "", report.releases, rows, ())))) == 2


def test_one_finding_in_many_places_stands_once(report):
    first = report.findings[0]
    many = tuple(replace(first, where=f"alpha/m{number}.py:3") for number in range(5))
    text = html(replace(report, findings=many))
    assert len(re.findall(r'<li id="f\d+">', text)) == 1
    assert "<summary>5 places</summary>" in text
    assert all(f"alpha/m{number}.py:3" in text for number in range(5))


def test_what_several_releases_say_of_one_place_stands_together(report):
    first = report.findings[0]
    text = html(replace(report, findings=(first, replace(first, what="it is gone in another release, too"))))
    assert len(re.findall(r'<li id="f\d+">', text)) == 1
    assert f"<p>{first.what}</p><p>it is gone in another release, too</p>" in text


def test_findings_have_anchors_and_errors_come_first(report):
    text = html(report)
    assert '<li id="f1"><a href="#f1">P201</a> <b class="w bad">error</b>' in text
    assert '<li id="f2"><a href="#f2">P207</a>' in text
    assert "Next: run <code>vllm-graft diff</code>" in text


def test_hostile_names_arrive_as_text(hostile):
    assert "a|b`c``d</code></td><script>alert('x')</script>\"&@octocat #12 **e** [31m" in Page(html(hostile)).text


def test_the_page_is_made_for_phones_and_for_the_dark(report):
    text = html(report)
    assert 'name="viewport"' in text
    assert "color-scheme:light dark" in text
    assert "prefers-color-scheme:dark" in text


def test_a_page_of_the_usual_size_is_small(make, report):
    """44 rows and 7 releases, half of the cells changed."""
    releases = tuple(f"0.{minor}.0" for minor in range(26, 33))
    sample = make("alpha", "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", "body", "same")
    cells = tuple(replace(sample.cells[index % 2], release=each) for index, each in enumerate(releases))
    full = Report(report.packages, "", releases, (replace(sample, cells=cells),) * 44, report.findings)
    assert len(html(full).encode()) < 60_000


def test_with_many_releases_the_matrix_scrolls_in_its_box(report):
    assert '<div class="matrix fits"' in html(report)
    assert '<div class="matrix"' in html(replace(report, releases=tuple(f"0.{minor}.0" for minor in range(12))))


def test_an_empty_report_has_a_summary_and_no_matrix(empty):
    text = html(empty)
    assert "No use of vLLM was found" in text
    assert "<table" not in text
    assert 'id="findings"' not in text


def test_the_same_report_gives_the_same_page(report):
    assert html(report) == html(report)
