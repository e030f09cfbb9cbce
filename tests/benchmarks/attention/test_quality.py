"""The figures of ``python -m benchmarks.attention quality``: what they are made of, and the page that shows them."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.attention.policies import all_policies
from benchmarks.attention.prompts import CONTEXT, CONTEXTS, PLACES, TEXTS, make_context
from benchmarks.attention.quality import summarize, tables
from benchmarks.attention.quality_picture import draw

from vllm_graft.bindings.attention.compaction import SMALLEST_STEP

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/explanation/benchmarks/attention-quality.md"


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "benchmarks/attention/quality.json").read_text(encoding="utf-8"))


def words(text: str) -> list[str]:
    """Tokens that can be read, long enough that a context is not thousands of them."""
    return text.split()


def test_a_fact_stands_where_it_is_said_to_stand():
    for number in range(CONTEXTS):
        context = make_context(number, words)  # type: ignore[arg-type]
        assert len(context.tokens) == CONTEXT
        for fact in context.facts:
            at = context.tokens.index(f"{fact.word}.") / CONTEXT
            assert at == pytest.approx(fact.place, abs=0.05), fact


def test_there_are_ten_questions_about_each_place_and_no_word_twice():
    facts = [fact for number in range(CONTEXTS) for fact in make_context(number, words).facts]  # type: ignore[arg-type]
    assert [sum(fact.place == place for fact in facts) for place in PLACES] == [10, 10, 10]
    assert len({fact.word for fact in facts}) == 30


def test_texts_are_long_enough():
    for text in TEXTS:
        assert len(text.load()) > 6 * 4096, text.name


def test_figures_are_summed_over_texts_and_contexts():
    names = [policy.name for policy in all_policies()]
    lost = {"policy": "", "loss": 400.0, "changed": 50, "seen": 100}
    full = {"policy": "", "loss": 200.0, "changed": 0, "seen": 1000}
    text = {"kind": "text", "predicted": 100, "text": {"name": "a"}, "rows": [full, *[lost] * (len(names) - 1)]}
    facts = [{"attribute": "a", "word": "river", "place": 0.1}, {"attribute": "b", "word": "lemon", "place": 0.9}]
    answers = [{"answers": [" River.", " none"]}, *[{"answers": [" River.", " lemon"]}] * (len(names) - 1)]
    context = {"kind": "context", "facts": facts, "rows": answers}
    done = [{**context, "number": 0}, {**text, "number": 1}, {**text, "number": 0}]
    first, second, *_ = summarize("m", done, 1.0)["rows"]
    assert (first["perplexity"], first["changed"], first["seen"]) == (7.389, 0, 1000)
    assert (second["perplexity"], second["changed"], second["seen"]) == (54.598, 0.5, 100)
    assert (first["equal"], first["found"]) == (2, {"0.1": [1, 1], "0.9": [0, 1]})
    assert (first["held"], second["held"]) == (CONTEXT, 192)
    assert (second["equal"], second["found"]) == (1, {"0.1": [1, 1], "0.9": [1, 1]})


def test_a_question_begins_with_a_step_of_every_window():
    """So that it and its answer are one step: a window would move inside an answer."""
    assert CONTEXT % SMALLEST_STEP == 0


def test_the_page_has_the_tables_and_the_picture_of_the_record(record):
    """``make pictures`` draws it anew."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(table in text for table in tables(record))
    assert PAGE.with_suffix(".svg").read_text(encoding="utf-8") == draw(record)


def test_the_record_is_summed_up_as_it_would_be_today(record):
    assert summarize(record["model"], record["jobs"], record["seconds"]) == record


def test_the_picture_is_static_and_fits_light_and_dark(record):
    text = draw(record)
    root = ElementTree.fromstring(text)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg", "title", "style", "rect", "line", "text", "polyline", "circle",
    }  # fmt: skip
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
