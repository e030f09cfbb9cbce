"""What the models read: long texts that come with Python, and contexts in which facts are hidden."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Final

TOKENS: Final = 4096
"""Tokens of a text that are read."""
CONTEXT: Final = 1536
"""Tokens of a context: whole steps of a window, so that a question and its answer are one step of all windows."""
CONTEXTS: Final = 3
FACTS: Final = 10
"""Facts in each context, and questions about it."""
PLACES: Final = (0.1, 0.5, 0.9)
"""Where in its context a fact stands, in turn."""

ATTRIBUTES: Final = (
    "password of the vault|name of the captain|colour of the gate|title of the song|nickname of the twins|"
    "symbol of the club|gift for the queen|brand of the bicycle|theme of the party|name of the village"
)
WORDS: Final = (
    "river apple castle garden silver window bridge thunder pencil lemon forest hammer island mirror orange pepper "
    "rabbit saddle tunnel violin wagon yellow anchor basket candle desert engine feather guitar honey"
)
SUBJECTS: Final = "farmer teacher sailor baker doctor painter gardener driver nurse tailor singer clerk hunter miller"
DEEDS: Final = "walked waited worked rested sang cooked read slept talked smiled"
SPOTS: Final = (
    "in the old barn|near the market|behind the school|on the long road|at the harbour|beside the church|"
    "under the tall trees|in the small kitchen|by the lake|outside the town hall"
)
TIMES: Final = "in the morning|after lunch|before sunset|all day long|for an hour|on Sunday|during the winter"


@dataclass(frozen=True)
class Text:
    """A text, and where it comes from."""

    name: str
    licence: str
    load: Callable[[], str]

    def describe(self) -> dict[str, str]:
        """Return its name, licence and checksum: it may differ between versions of Python."""
        digest = hashlib.sha256(self.load().encode()).hexdigest()
        return {"name": self.name, "licence": self.licence, "sha256": digest}


TEXTS: Final = (
    Text('pydoc_data.topics["specialnames"]', "PSF-2.0", lambda: topics["specialnames"]),
    Text("argparse.py", "PSF-2.0", lambda: inspect.getsource(argparse)),
    Text('pydoc_data.topics["compound"]', "PSF-2.0", lambda: topics["compound"]),
)
"""Prose with examples, code, and prose with grammar, out of the standard library."""


@dataclass(frozen=True)
class Fact:
    """What something in the context is, and the place where it is said."""

    attribute: str
    word: str
    place: float

    @property
    def sentence(self) -> str:
        return f" The {self.attribute} is {self.word}."

    @property
    def question(self) -> str:
        return f"\n\nQuestion: What is the {self.attribute}?\nAnswer: The {self.attribute} is"


@dataclass(frozen=True)
class Context:
    """A context, and the questions about it."""

    tokens: list[int]
    facts: list[Fact]
    questions: list[list[int]]


def make_context(number: int, tokenize: Callable[[str], list[int]]) -> Context:
    """Make one of the contexts; always the same for a tokenizer."""
    facts = make_facts(number)
    chance = random.Random(number)
    filler: list[str] = []
    while True:
        filler.append(_sentence(chance))
        sentences = list(filler)
        for fact in sorted(facts, key=lambda fact: -fact.place):
            sentences.insert(int(fact.place * len(filler)), fact.sentence)
        tokens = [token for sentence in sentences for token in tokenize(sentence)]
        if len(tokens) >= CONTEXT:
            # The first sentence is cut, not the one before the question.
            return Context(tokens[-CONTEXT:], facts, [tokenize(fact.question) for fact in facts])


def _sentence(chance: random.Random) -> str:
    who, does = chance.choice(SUBJECTS.split()), chance.choice(DEEDS.split())
    return f" The {who} {does} {chance.choice(SPOTS.split('|'))} {chance.choice(TIMES.split('|'))}."


def make_facts(context: int) -> list[Fact]:
    """Make the facts of a context: in each, an attribute has another word, and stands at another place."""
    attributes, words = ATTRIBUTES.split("|"), WORDS.split()
    numbers = range(context * FACTS, (context + 1) * FACTS)
    return [Fact(attributes[i % FACTS], words[i], PLACES[i % len(PLACES)]) for i in numbers]
