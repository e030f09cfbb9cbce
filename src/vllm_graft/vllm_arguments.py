"""vLLM's command line, read without importing vLLM.

vLLM's parser takes ``--a-b c``, ``--a_b=c`` and ``--a.b c`` (a part of a JSON argument), takes a name cut short where
that is unambiguous, and lets the last of several win.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """The words of a command line. Names are given in full and with dashes: ``--max-model-len``."""

    words: tuple[str, ...] = ()

    def value(self, name: str) -> str | None:
        """Return an argument's last value, empty if it has none; None if the argument is absent."""
        found = None
        for place, word in enumerate(self.words):
            key, equals, value = word.partition("=")
            if _dashed(key) == name:
                following = self.words[place + 1] if place + 1 < len(self.words) else ""
                found = value if equals else "" if following.startswith("--") else following
        return found

    def values(self, name: str) -> list[str]:
        """Return all values of an argument that takes several, the last time it is given."""
        found: list[str] = []
        taking = False
        for word in self.words:
            if word.startswith("-"):
                key, _, value = word.partition("=")
                taking = _dashed(key) == name
                found = ([value] if value else []) if taking else found
            elif taking:
                found.append(word)
        return found

    def possible_values(self, *names: str) -> list[str]:
        """Return every value that may be meant for an argument, by its full name, cut short, or by a short name.

        A value may be glued to a short name. vLLM takes that of a name of one letter (``-qfp8``) and refuses it of
        ``-tp4``; here both count, since the point is to notice what may change the outcome.
        """
        found = []
        for place, word in enumerate(self.words):
            if word.startswith("--"):
                key, _, value = word.partition("=")
                key = _dashed(key.partition(".")[0])
                if len(key) == 2 or not any(name.startswith(key) for name in names):
                    continue
            else:
                short = next((name for name in names if not name.startswith("--") and word.startswith(name)), None)
                if short is None:
                    continue
                value = word.removeprefix(short).removeprefix("=")
            found.append(value or "".join(self.words[place + 1 : place + 2]))
        return found

    @property
    def model(self) -> str:
        """The model, first or after ``--model``; empty if none is named."""
        words = [word for word in self.words[:2] if word not in ("vllm", "serve")]
        first = words[0] if words and not words[0].startswith("-") else ""
        return self.value("--model") or first

    def given(self, name: str) -> bool:
        """Return whether an argument is there, or a part of it (``--speculative-config.method``)."""
        keys = [_dashed(word.partition("=")[0]) for word in self.words]
        return any(key == name or key.startswith(f"{name}.") for key in keys)

    def any_begins(self, *beginnings: str) -> bool:
        """Return whether any word begins like this: ``--ssl`` stands for ``--ssl-keyfile`` and others."""
        return any(_dashed(word).startswith(beginnings) for word in self.words)

    def switched(self, name: str) -> bool | None:
        """Return a switch that has an opposite ``--no-…``: on, off, or None if neither is there."""
        found = None
        for word in self.words:
            key = _dashed(word.partition("=")[0])
            if key in (name, f"--no-{name[2:]}"):
                found = key == name
        return found

    def document(self, name: str) -> dict[str, object]:
        """Return the JSON object that an argument holds; empty if it holds none."""
        try:
            found = json.loads(self.value(name) or "{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _dashed(name: str) -> str:
    return name.replace("_", "-")
