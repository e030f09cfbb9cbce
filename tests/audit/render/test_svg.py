"""The picture for a README."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from vllm_graft.audit.render import svg

SVG = "{http://www.w3.org/2000/svg}"


def _words(picture: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ["report", "empty", "hostile"])
def test_the_picture_is_xml_and_stands_alone(name, request):
    picture = svg(request.getfixturevalue(name))
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {"svg", "title", "style", "rect", "text", "tspan"}
    assert picture.count("http") == 1


def test_it_has_releases_names_words_and_the_caption(report):
    words = _words(svg(report, caption="Six names & two releases"))
    assert words[:2] == ["0.31.0", "0.32.0"]
    assert words[2:5] == ["v1.worker:Worker.stop", "sig!", "gone"]
    assert "Six names & two releases" in words
    assert "· unchanged" in words[-1]


def test_without_a_caption_the_summary_stands_below(report):
    assert "4 of 6 uses of vLLM need a look" in " ".join(_words(svg(report)))


def test_few_rows_stand_for_all_from_the_worst_to_the_unchanged(report):
    words = _words(svg(report, rows=3))
    assert [word for word in words if ":" in word] == [
        "v1.worker:Worker.stop",
        "v1.sched:Scheduler.__init__",
        "v1.late:Later",
    ]
    assert [word for word in _words(svg(report, rows=1)) if ":" in word] == ["v1.worker:Worker.stop"]


def test_a_name_used_twice_is_shown_once_at_its_worst(make, report):
    rows = (make("alpha", "vllm.a:b", "same", "same"), make("beta", "vllm.a:b", "same", "gone"))
    words = _words(svg(replace(report, rows=rows)))
    assert words.count("a:b") == 1
    assert "gone" in words


def test_it_follows_the_screen_into_the_dark(report):
    assert "prefers-color-scheme:dark" in svg(report)


def test_everything_is_within_the_picture(report):
    root = ElementTree.fromstring(svg(report, caption="a long caption " * 30))
    bottom = max(float(each.get("y", 0)) for each in root.iter(f"{SVG}text"))
    assert bottom < float(root.get("height", 0))
    right = max(float(each.get("x", 0)) + float(each.get("width", 0)) for each in root.iter(f"{SVG}rect"))
    assert right <= float(root.get("width", 0))
