"""The pictures of docs/reference/samplers are what their script draws, and a browser shows them without scripts."""

import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

import sampler_pictures

NAMES = ["xtc.svg", "top-n-sigma.svg", "dry.svg", "no-repeat-ngram.svg", "constrained-json.svg"]


@cache
def drawn() -> dict[str, str]:
    return sampler_pictures.pictures()


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_in_the_docs_is_what_the_strategy_does(name: str):
    """`make pictures` draws them anew."""
    assert (sampler_pictures.FOLDER / name).read_text(encoding="utf-8") == drawn()[name]


def test_there_is_no_other():
    assert sorted(drawn()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_static_and_fits_light_and_dark(name: str):
    text = drawn()[name]
    root = ElementTree.fromstring(text)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg", "title", "style", "rect", "line", "text", "polyline", "circle",
    }  # fmt: skip
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_text_that_repeats_itself_is_lowered_by_the_formula():
    """The picture's numbers are the strategy's, and the strategy's those of the page."""
    words = [*"abcdabcd"]
    assert sampler_pictures.penalty_of_last(words, dry_multiplier=0.8) == pytest.approx(0.8 * 1.75)
    assert sampler_pictures.penalty_of_last(words[:-1], dry_multiplier=0.8) == pytest.approx(0.8)
    assert sampler_pictures.penalty_of_last(words[:-2], dry_multiplier=0.8) == 0


def test_it_writes_where_it_is_told_to(tmp_path: Path):
    assert sampler_pictures.main([str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(NAMES)
