"""Every state has a word, a colour that can be read, and a meaning."""

from __future__ import annotations

from typing import get_args

import pytest

from vllm_graft.audit.model import State
from vllm_graft.audit.render.colours import DARK, LIGHT, PAPER
from vllm_graft.audit.render.words import WORDS, Tone, count, weight


def test_every_state_has_a_word_of_its_own():
    assert set(WORDS) == set(get_args(State))
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
@pytest.mark.parametrize("tones", [LIGHT, DARK], ids=["light", "dark"])
def test_a_word_can_be_read_on_its_colour(tones, tone):
    """At least the 4.5 to 1 that the web's accessibility guidelines (WCAG 2, level AA) ask for."""
    assert _contrast(*tones[tone]) >= 4.5


@pytest.mark.parametrize("ink", ["ink", "soft", "link"])
@pytest.mark.parametrize("screen", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_the_page(screen, ink):
    assert _contrast(PAPER[ink][screen], PAPER["paper"][screen]) >= 4.5
